"""Markdown and posts: code whole, headings with what follows, items and rows of tables as pieces."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking.markdown import blocks
from retrieval.words import count_words
from tests.unit.pipelines.chunking.texts import cut, real_data, real_texts

CODE = "```python\nfor x in y:\n\n    f(x)\n\n\n# no heading\n```\n"


def kinds(text: str) -> list[tuple[str, int]]:
    return [(block.kind, block.stop - block.first) for block in blocks(text.splitlines(keepends=True))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\ntext\n", [("heading", 1), ("prose", 1)]),
        ("Title\n=====\n\ntext\n", [("heading", 2), ("prose", 1), ("prose", 1)]),
        (CODE + "after\n", [("code", 8), ("prose", 1)]),
        ("~~~~\n```\n~~~\n~~~~\nx\n", [("code", 4), ("prose", 1)]),
        ("```\nnever closed\n\n# x\n", [("code", 4)]),
        (
            "a\n\n    code\n\n    more\n\nb\n",
            [("prose", 1), ("prose", 1), ("code", 3), ("prose", 1), ("prose", 1)],
        ),
        ("text\n    lazy\n", [("prose", 1), ("prose", 1)]),
        ("- item\n\n    of the item\n", [("item", 1), ("prose", 1), ("prose", 1)]),
        ("<pre><code>a\n\nb</code></pre>\nc\n", [("code", 3), ("prose", 1)]),
        ("| a | b |\n|---|---|\n1. x\n", [("item", 1), ("item", 1), ("item", 1)]),
        ("#hashtag\n", [("prose", 1)]),
    ],
)
def test_blocks(text: str, expected: list[tuple[str, int]]) -> None:
    assert kinds(text) == expected


def test_a_heading_begins_a_chunk_with_what_follows() -> None:
    text = "One two three four. Five six.\n\n## Next\n\n### Below\n\nSeven eight nine. Ten eleven.\n"
    assert cut(text, kind="markdown", max_words=12, min_words=3) == [
        "One two three four. Five six.\n\n",
        "## Next\n\n### Below\n\nSeven eight nine. Ten eleven.\n",
    ]


def test_code_is_whole_and_keeps_its_indentation() -> None:
    indented = "    a = 1\n\n    b = 2\n"
    text = f"Some words come first here. And more.\n\n{indented}\nThen others follow on that.\n"
    assert f"{indented}\n" in cut(text, kind="markdown", max_words=6, min_words=0)


def test_longer_code_is_cut_at_blank_lines_then_at_lines() -> None:
    text = "```\na b\nc d\n\ne f\ng h i j k l m n o p q\n```\n"
    assert cut(text, kind="markdown", max_words=6, min_words=0) == [
        "```\na b\nc d\n\n",
        "e f\n",
        "g h i j k l m n o p q\n",
        "```\n",
    ]


def test_items_of_a_list_are_pieces() -> None:
    text = "".join(f"- item number {number} without a full stop\n" for number in range(9))
    chunks = cut(text, kind="markdown", max_words=25, min_words=0)
    assert len(chunks) == 3
    assert all(chunk.startswith("- item") for chunk in chunks)


@given(st.lists(st.sampled_from(["Some words. More here.\n\n", CODE, "## Head\n\n", "- item\n", "\n"]), max_size=20))
def test_fences_are_whole_where_the_limit_allows(parts: list[str]) -> None:
    text = "".join(parts)
    chunks = cut(text, kind="markdown", max_words=15, min_words=2)
    assert "".join(chunks) == text or not text.strip()
    assert sum(chunk.count(CODE.strip()) for chunk in chunks) == parts.count(CODE)
    assert all(chunk.count("```") % 2 == 0 for chunk in chunks)
    for chunk, following in pairwise(chunks):
        assert not chunk.rstrip().endswith("## Head") or count_words(following) > 13


@real_data
@pytest.mark.parametrize("corpus", ["raw_techdocs", "raw_stackexchange_threads"])
def test_headings_of_real_documents_do_not_end_chunks(corpus: str) -> None:
    headings = 0
    for _, text in real_texts(corpus, 300):
        chunks = cut(text, kind="markdown")
        assert "".join(chunks) == text
        for chunk in chunks[:-1]:
            last = chunk.rstrip().rpartition("\n")[2]
            headings += bool(re.match(r"#{1,6} ", last)) and "```" not in chunk
    assert headings <= 3  # where what follows fills a chunk alone
