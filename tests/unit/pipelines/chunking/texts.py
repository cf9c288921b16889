"""Texts for the tests of chunking: made up by hypothesis, and real ones."""

import json
from pathlib import Path

from hypothesis import strategies as st

from pipelines.chunking.chunks import ChunkingSettings, Chunks, chunk_text

PARTS = [
    *"aB1 .!?\n\r\t\"'()“”。中あ한กิ😀…:;-«»|~#`{}=é",
    *"\uff01\uff1f\u2019\u2013\x00\x0b\x0c\x1c\x85\xa0\u0301\u200b\u200d\u2028\u2029\u3000\ud800\udfff",
    *("\n\n", "\r\n\r\n", " \n \n", "Mr. ", "e.g. ", " J.\xa0", "a" * 40, "word ", "A sentence. ", "漢字。", "/* "),
    *("```\n", "~~~~\n", "    ", "# ", "- ", "def f():\n", "class A:\n", "\nx = 1\n", "<pre>", "</pre>\n", "---\n"),
]
texts = st.lists(st.sampled_from(PARTS), max_size=60).map("".join)
limits = st.sampled_from([1, 2, 5, 12]).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most // 2)))


def real_texts(data: Path, name: str, documents: int) -> list[tuple[str, str]]:
    """Id and text of the first documents of a raw corpus."""
    with (data / name / "docs.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for _, line in zip(range(documents), file, strict=False)]
    return [(row["id"], row["text"]) for row in rows]


def cut(text: str, source_id: str = "", **settings: object) -> list[str]:
    """The texts of the chunks."""
    return texts_of(text, chunk_text(text, ChunkingSettings.model_validate(settings), source_id))


def texts_of(text: str, chunks: Chunks) -> list[str]:
    """The chunks' stretches of the text."""
    return [text[start:end] for start, end in zip(chunks.starts, chunks.ends, strict=True)]
