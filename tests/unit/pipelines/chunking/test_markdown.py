"""Markdown and posts: code whole, headings with what follows, items and rows of tables as pieces."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking.markdown import blocks, titles_of_chunks
from retrieval.words import count_words
from tests.unit.pipelines.chunking.texts import cut, real_texts

CODE = "```python\nfor x in y:\n\n    f(x)\n\n\n# no heading\n```\n"


@pytest.mark.parametrize(("text", "expected"), [
    ("# A\ntext\n", [("heading", 0, 1, 1, "A")]),
    ("text\n\nTitle\n-----\n\ntext\n", [("heading", 2, 4, 2, "Title")]),
    ("two\nlines\n===\n", []),
    ("> # quoted\n\n## B ##\n", [("heading", 2, 3, 2, "B")]),
    (CODE + "after\n", [("code", 0, 8)]),
    ("~~~~\n```\n~~~\n~~~~\nx\n", [("code", 0, 4)]),
    ("```\nnever closed\n\n# x\n", [("code", 0, 4)]),
    ("a\n\n    code\n\n    more\n\nb\n", [("code", 2, 5)]),
    ("a\r\n\r\n    code\rb\n", [("code", 2, 3)]),
    ("text\n    lazy\n", []),
    ("- item\n\n    of the item\n", [("item", 0, 3)]),
    ("- item\n\n      code\n- x\n", [("item", 0, 3), ("code", 2, 3), ("item", 3, 4)]),
    ("<pre><code>a\n\nb</code></pre>\nc\n", [("code", 0, 3)]),
    ("<PRE>a\n\nb</PRE>\nc\n", [("code", 0, 3)]),
    ("<div>\na\n</div>\n\n# <pre>\n", [("heading", 4, 5, 1, "<pre>")]),
    ("| a | b |\n|---|---|\n| c | d |\n\n1. x\n", [("table", 0, 3), ("item", 0, 1), ("item", 2, 3), ("item", 4, 5)]),
    ("## [Use](https://x.org/a?b=0) <a name=\"u\"></a> {#use}\n", [("heading", 0, 1, 2, "Use")]),
    ("**Limits** of `foo` &amp; \\*x\\*\n---\n", [("heading", 0, 2, 2, "Limits of foo & *x*")]),
    ("# f-string {.2f}\n", [("heading", 0, 1, 1, "f-string {.2f}")]),
    ("# Rate {:>10}\n", [("heading", 0, 1, 1, "Rate {:>10}")]),
    ("# List<String> ![logo](x.png)\n", [("heading", 0, 1, 1, "List<String>")]),
    ("#hashtag\n", []),
    ("", []),
])  # fmt: skip
def test_blocks(text: str, expected: list[tuple[str | int, ...]]) -> None:
    assert list(blocks(text)) == [(*block, 0, "")[:5] for block in expected]


PAGE = """Before any heading.

# Guide

Intro.

## Install

### Linux

One. Two.

| pin | use |
|-----|-----|
| 1   | supply |
| 2   | ground |

## Run

Three.
"""


@pytest.mark.parametrize(("begins_with", "title"), [
    ("Before", "Relay"),
    ("# Guide", "Relay"),  # it stands in the chunk itself
    ("Intro", "Relay > Guide"),
    ("## Install", "Relay > Guide"),
    ("### Linux", "Relay > Guide > Install"),
    ("Two.", "Relay > Guide > Install > Linux"),
    ("| pin", "Relay > Guide > Install > Linux"),
    ("| 1 ", "Relay > Guide > Install > Linux: pin | use"),
    ("| 2 ", "Relay > Guide > Install > Linux: pin | use"),
    ("## Run", "Relay > Guide"),
    ("Three", "Relay > Guide > Run"),
])  # fmt: skip
def test_a_chunk_is_called_by_the_headings_above_it(begins_with: str, title: str) -> None:
    start = PAGE.index(begins_with)
    assert list(titles_of_chunks(PAGE, "Relay", [start])) == [title]
    assert list(titles_of_chunks(PAGE, "Relay", [0, start]))[-1] == title
    assert list(titles_of_chunks(PAGE, "Relay", [start - 1]))[-1] == title  # white space before belongs to no heading


def test_titles_without_one_of_the_document_and_with_the_same_heading() -> None:
    starts = [PAGE.index(text) for text in ("Before", "Intro", "| 2")]
    assert list(titles_of_chunks(PAGE, "", starts)) == ["", "Guide", "Guide > Install > Linux: pin | use"]
    assert next(titles_of_chunks(PAGE, "Guide", starts[1:])) == "Guide"
    below = "| a | b |\n|---|---|\n| c | d |\n# Next\n"
    assert list(titles_of_chunks(below, "", [0, 20, 30])) == ["", "a | b", ""]


def test_headings_begin_chunks_code_is_whole_or_cut_at_lines_and_items_are_pieces() -> None:
    text = "One two three four. Five six.\n\n## Next\n\n### Below\n\nSeven eight nine. Ten eleven.\n"
    assert cut(text, kind="markdown", max_words=12, min_words=3) == [
        "One two three four. Five six.\n\n",
        "## Next\n\n### Below\n\nSeven eight nine. Ten eleven.\n",
    ]
    indented = "    a = 1\n\n    b = 2\n"
    text = f"Some words come first here. And more.\n\n{indented}\nThen others follow on that. One more.\n"
    assert cut(text, kind="markdown", max_words=6, min_words=0) == [
        "Some words come first here. ", "And more.\n\n", f"{indented}\n", "Then others follow on that. ", "One more.\n",
    ]  # fmt: skip
    text = "Intro one.\n\n## Head\n\nSeven eight nine ten.\n"  # what follows a heading is in its chunk where it fits
    assert cut(text, kind="markdown", max_words=6, min_words=3) == ["Intro one.\n\n", text[12:]]
    text = "## Head\n\nSeven eight nine ten eleven.\n"  # and where not, it is none of its words
    assert cut(text, kind="markdown", max_words=6, min_words=0) == ["## Head\n\n", text[9:]]
    text = "a b c d\n\n- e\n- f g h i j k l\n"  # items begin no chunk, and are cut
    assert cut(text, kind="markdown", max_words=6, min_words=0) == ["a b c d\n\n- e\n", "- f g h i j ", "k l\n"]
    text = "- They go in. Then they come out again.\n"
    assert cut(text, kind="markdown", max_words=5, min_words=0) == ["- They go in. ", text[14:]]
    text = "```\na b\nc d\n\ne f\ng h i j k l m n o p q\n```\n"
    assert cut(text, kind="markdown", max_words=6, min_words=0) == [
        "```\na b\nc d\n\n", "e f\n", "g h i j k l m n o p q\n", "```\n",
    ]  # fmt: skip
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


@pytest.mark.parametrize("corpus", ["raw_techdocs", "raw_stackexchange_threads"])
def test_headings_of_real_documents_do_not_end_chunks(data: Path, corpus: str) -> None:
    headings = 0
    for _, text in real_texts(data, corpus, 300):
        chunks = cut(text, kind="markdown")
        assert "".join(chunks) == text
        for chunk in chunks[:-1]:
            last = chunk.rstrip().rpartition("\n")[2]
            headings += bool(re.match(r"#{1,6} ", last)) and "```" not in chunk
    assert headings <= 3  # where what follows fills a chunk alone
