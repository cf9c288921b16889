"""Markdown and posts: sentences between headings, items of lists and rows of tables, and blocks of code."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

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

_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,}|<pre\b)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:\s|$)")
_UNDERLINE = re.compile(r" {0,3}(?:={2,}|-{2,})\s*$")
_ITEM = re.compile(r"\s*(?:[-*+]|[0-9]{1,9}[.)])\s")
_TABLE_ROW = re.compile(r"\s*\|")
_INDENTED = re.compile(r"(?: {4}|\t)")


class Block(NamedTuple):
    """Rows from ``first`` up to ``stop``; an item may have any number of rows, as prose."""

    kind: Literal["prose", "item", "heading", "code"]
    first: int
    stop: int


def blocks(lines: list[str]) -> Iterator[Block]:
    """The blocks that the lines consist of, one after the other.

    Code is what stands between fences or ``<pre>`` and ``</pre>``, or is indented by four after a blank line and
    outside of lists. A fence that is never closed encloses the rest.
    """
    row, in_list = 0, False
    while row < len(lines):
        line = lines[row]
        after_blank = row == 0 or not lines[row - 1].strip()
        if opening := _FENCE.match(line):
            stop = _end_of_fence(lines, row, opening[1])
            yield Block("code", row, stop)
        elif _HEADING.match(line):
            stop, in_list = row + 1, False
            yield Block("heading", row, stop)
        elif after_blank and line.strip() and row + 1 < len(lines) and _UNDERLINE.match(lines[row + 1]):
            stop, in_list = row + 2, False
            yield Block("heading", row, stop)
        elif after_blank and not in_list and _is_indented(line):
            stop = _end_of_indented(lines, row)
            yield Block("code", row, stop)
        elif _ITEM.match(line) or _TABLE_ROW.match(line):
            stop, in_list = row + 1, in_list or bool(_ITEM.match(line))
            yield Block("item", row, stop)
        else:
            if after_blank and line.strip() and not line[0].isspace():
                in_list = False
            stop = row + 1
            yield Block("prose", row, stop)
        row = stop


def _is_indented(line: str) -> bool:
    return bool(_INDENTED.match(line)) and not line.isspace()


def _end_of_fence(lines: list[str], row: int, fence: str) -> int:
    if fence == "<pre":
        closed = re.compile(r".*</pre>", re.IGNORECASE)
        if closed.match(lines[row]):
            return row + 1
    else:
        closed = re.compile(rf"\s*{fence[0]}{{{len(fence)},}}\s*$")
    for end in range(row + 1, len(lines)):
        if closed.match(lines[end]):
            return end + 1
    return len(lines)


def _end_of_indented(lines: list[str], row: int) -> int:
    stop = row
    for end in range(row, len(lines)):
        if _is_indented(lines[end]):
            stop = end + 1
        elif lines[end].strip():
            break
    return stop


def markdown_pieces(text: str, words: TextWords, language: str, max_words: int) -> tuple[Pieces, int]:
    """Sentences, list items, and headings with what follows them; code in one piece where a chunk can hold it.

    Longer code is cut at blank lines, then at lines. Also returns the stretches in which sentencex failed.
    """
    rows = row_starts(text)
    bounds = [*rows.tolist(), len(text)]
    found = list(blocks([text[start:stop] for start, stop in pairwise(bounds)]))
    whole = [(bounds[block.first], bounds[block.stop]) for block in found if block.kind in ("heading", "code")]
    sentences, failures = sentence_ends(text, words, language)
    ends = _not_inside(sentences, whole)
    ends += [offset for span in whole for offset in span]
    ends += [bounds[block.first] for block in found if block.kind == "item"]
    code = [block for block in found if block.kind == "code"]
    before = words_before(words, rows)
    levels = levels_by_blank_lines(text, rows) if code else None
    sealed = []
    for block in code:
        assert levels is not None
        firsts = cut_rows(before[block.first : block.stop + 1], levels[block.first : block.stop], max_words)
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
    bounds = [0, *ends[(ends > words.first) & (ends < words.length)].tolist(), words.length]
    before = np.searchsorted(words.word_starts(ends), bounds)
    is_heading = set(headings.tolist())
    if headings.size and headings[0] <= words.first:
        is_heading.add(0)
    kept = [len(bounds) - 1]
    for number in range(len(bounds) - 2, 0, -1):
        # the piece before this end begins at bounds[number - 1], the one behind it ends at the last end kept
        if bounds[number - 1] in is_heading and before[kept[-1]] - before[number - 1] <= max_words:
            continue
        kept.append(number)
    return np.array([bounds[number] for number in reversed(kept)], np.int64)
