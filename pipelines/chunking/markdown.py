"""Markdown and posts: sentences between headings, items of lists and rows of tables, and blocks of code."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipelines.chunking.pieces import (
    Pieces,
    after_space_at_lines,
    cut_rows,
    levels_by_blank_lines,
    row_starts,
    words_before,
)
from pipelines.chunking.sentences import sentence_ends
from retrieval.words import Offsets, TextWords

# CommonMark's blocks and tables, without what is inside of a line
_PARSER = MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"])
_INLINE = MarkdownIt("commonmark")
_TAG = re.compile(r"</?(?:a|b|br|code|em|font|i|img|kbd|small|span|strong|sub|sup|svg)\b|<!--")  # what is <T>, stays
_ATTRIBUTES = re.compile(r"\s*\{(?:[#.][A-Za-z]|: )[^}]*\}\s*$")  # behind a heading: {#install}


_NOT_SPACE = re.compile(r"\S")


class Block(NamedTuple):
    """Rows from ``first`` up to ``stop``. Of a heading, ``level`` (from 1) and ``text``; an item may hold code."""

    kind: Literal["item", "heading", "code", "table"]
    first: int
    stop: int
    level: int = 0
    text: str = ""


@lru_cache(maxsize=1)  # a document's pieces and its chunks' titles ask for the same text
def blocks(text: str) -> tuple[Block, ...]:
    """Headings outside of lists and quotes, items of lists, tables and their rows, and blocks of code, in order.

    Code is what stands between fences or ``<pre>`` and ``</pre>``, or is indented, as CommonMark has it. A heading is
    one line, which another may underline.
    """
    return tuple(_blocks(_PARSER.parse(text)))


def _blocks(tokens: Sequence[Token]) -> Iterator[Block]:
    for place, token in enumerate(tokens):
        first, stop = token.map or (0, 0)
        is_pre = token.type == "html_block" and token.content.lstrip()[:4].lower() == "<pre"
        if token.type in ("fence", "code_block") or is_pre:
            yield Block("code", first, stop)
        elif token.type == "table_open":
            yield Block("table", first, stop)
        elif token.type in ("list_item_open", "tr_open"):
            yield Block("item", first, stop)
        elif token.type == "heading_open" and not token.level and "\n" not in tokens[place + 1].content:
            yield Block("heading", first, stop, int(token.tag[1:]), _plain(tokens[place + 1].content))


def _plain(heading: str) -> str:
    """What a reader sees of a heading's line, without markup."""
    (line,) = _INLINE.parseInline(_ATTRIBUTES.sub("", heading))
    parts = [part for part in line.children or () if part.type != "html_inline" or not _TAG.match(part.content)]
    return "".join(part.content for part in parts if part.type != "image").strip()


class Section(NamedTuple):
    """A stretch of text below a heading, up to the next one; ``start`` is behind the heading's line.

    ``path``: the headings above it, outermost first, its own last; empty for what stands before the first heading.
    """

    path: tuple[str, ...]
    start: int
    end: int


def sections(text: str) -> list[Section]:
    """The text cut at its headings, in order; together with the heading lines they tile it."""
    found: list[Section] = []
    path: list[tuple[int, str]] = []
    start, rows = 0, [*row_starts(text).tolist(), len(text)]
    for block in blocks(text):
        if not block.text:  # no heading, or one without a word
            continue
        found.append(Section(tuple(name for _, name in path), start, rows[block.first]))
        path = [(level, name) for level, name in path if level < block.level] + [(block.level, block.text)]
        start = rows[block.stop]
    return [*found, Section(tuple(name for _, name in path), start, len(text))]


def titles_of_chunks(text: str, title: str, starts: Sequence[int]) -> Iterator[str]:
    """For each chunk the document's title and the headings that it stands below, ``Guide > Install > Linux``.

    A chunk that begins inside a table has the table's header row behind them. ``starts``: where chunks begin, in order.
    """
    rows = [*row_starts(text).tolist(), len(text)]
    found = [block for block in blocks(text) if block.kind in ("heading", "table")]
    place, above, table = 0, list[Block](), None
    for start in starts:
        begin = _NOT_SPACE.search(text, start)
        offset = begin.start() if begin else len(text)
        while place < len(found) and rows[found[place].first] < offset:
            block, place = found[place], place + 1
            if block.kind == "table":
                table = block
            else:
                above = [*_below(block.level, above), block]
        opened = found[place] if place < len(found) and rows[found[place].first] == offset else None
        path = _below(opened.level, above) if opened and opened.kind == "heading" else above
        names = " > ".join(dict.fromkeys(filter(None, [title, *(block.text for block in path)])))
        header = ""
        if table and offset < rows[table.stop]:
            header = text[rows[table.first] : rows[table.first + 1]].strip(" |\n")
        yield ": ".join(filter(None, [names, header]))


def _below(level: int, headings: list[Block]) -> list[Block]:
    """The ``headings`` above a heading of this level."""
    return [block for block in headings if block.level < level]


def markdown_pieces(text: str, words: TextWords, language: str, max_words: int) -> tuple[Pieces, int]:
    """Sentences, list items, and headings with what follows them; code in one piece where a chunk can hold it.

    Longer code is cut at blank lines, then at lines. Also returns the stretches that sentencex failed on.
    """
    rows = row_starts(text)
    bounds = [*rows.tolist(), len(text)]
    found = blocks(text)
    whole = [(bounds[block.first], bounds[block.stop]) for block in found if block.kind in ("heading", "code")]
    sentences, failures = sentence_ends(text, words, language)
    ends = _not_inside(sentences, whole)
    ends += [offset for span in whole for offset in span]
    ends += [bounds[block.first] for block in found]
    code = [block for block in found if block.kind == "code"]
    before = words_before(words, rows)
    levels = levels_by_blank_lines(text, rows) if code else None
    sealed = []
    for block in code:
        assert levels is not None
        firsts = cut_rows(before[block.first :], levels[block.first : block.stop], max_words)
        sealed += [bounds[block.first + first] for first in firsts]
    headings = [bounds[block.first] for block in found if block.kind == "heading"]
    moved = [
        after_space_at_lines(np.array(offsets, np.int64), words, rows) for offsets in (ends + sealed, headings, sealed)
    ]
    return Pieces(_join_headings(np.unique(moved[0]), moved[1], words, max_words), *moved[1:]), failures


def _not_inside(ends: Offsets, spans: list[tuple[int, int]]) -> list[int]:
    """The ends that are not inside of a span; spans are in order and apart."""
    if not spans:
        return list(ends.tolist())
    starts, stops = np.array(spans).T
    span = np.searchsorted(starts, ends) - 1
    inside = (span >= 0) & (ends < stops[np.maximum(span, 0)])
    kept: list[int] = ends[~inside].tolist()
    return kept


def _join_headings(ends: Offsets, headings: Offsets, words: TextWords, max_words: int) -> Offsets:
    """Takes away the end behind each heading, from the last to the first, where a chunk can hold what follows too."""
    bounds = [0, *ends.tolist()]  # the last one is the text's
    before = np.searchsorted(words.word_starts(ends), bounds)
    is_heading = set(headings.tolist())
    kept = [len(bounds) - 1]
    for number in range(len(bounds) - 2, 0, -1):
        # the piece before this end begins at bounds[number - 1], the one behind it ends at the last end kept
        if bounds[number - 1] in is_heading and before[kept[-1]] - before[number - 1] <= max_words:
            continue
        kept.append(number)
    return np.array([bounds[number] for number in reversed(kept)], np.int64)
