"""Cutting at lines alone: the rows of a text, and how to cut a stretch of them at the best places there are."""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.chunking.pieces import Pieces
from raytriever.pipelines.chunking.words import Offsets, TextWords

AFTER_BLANK = 100  # levels: the lower, the sooner a cut is made before that row
ANY = 101

_LINE_END = re.compile(r"\r\n|\n|\r")


def row_starts(text: str) -> Offsets:
    """Where each line begins; a line ends with a line feed, a carriage return or both."""
    starts = [0, *(end.end() for end in _LINE_END.finditer(text))]
    if starts[-1] == len(text) and len(starts) > 1:
        starts.pop()
    return np.array(starts, dtype=np.int64)


def levels_by_blank_lines(text: str, rows: Offsets) -> NDArray[np.int64]:
    """``AFTER_BLANK`` for each row behind a blank one, ``ANY`` for the others."""
    levels = np.full(len(rows), ANY)
    was_blank = False
    for row, (start, stop) in enumerate(pairwise([*rows.tolist(), len(text)])):
        is_blank = text[start:stop].isspace()
        if was_blank and not is_blank:
            levels[row] = AFTER_BLANK
        was_blank = is_blank
    return levels


def cut_rows(
    before: NDArray[np.int64], levels: NDArray[np.int64], max_words: int, sections: Sequence[int] = ()
) -> list[int]:
    """The first rows of the pieces: a stretch of more than ``max_words`` is cut before its rows of the lowest level.

    A single row is never cut. ``before``: (rows + 1,) words before each row, and at the end; ``levels``: (rows,).
    ``sections``: rows above 0, increasing, before which cuts are made in any case.
    """
    pieces = []
    pending = list(pairwise([0, *sections, len(levels)]))[::-1]
    while pending:
        first, stop = pending.pop()
        if stop - first <= 1 or before[stop] - before[first] <= max_words:
            pieces.append(first)
            continue
        inner = levels[first + 1 : stop]
        bounds = [first, *(first + 1 + np.flatnonzero(inner == inner.min())).tolist(), stop]
        pending += list(pairwise(bounds))[::-1]
    return pieces


def words_before(words: TextWords, rows: Offsets) -> NDArray[np.int64]:
    """Words before each row, and at the end: (rows + 1,)."""
    starts = words.word_starts(np.empty(0, np.int64))
    return np.append(np.searchsorted(starts, rows), len(starts))


def settle_at_lines(offsets: Offsets, words: TextWords, rows: Offsets) -> Offsets:
    """Moves offsets over white space as ``TextWords.settle``, but leaves a line its indentation."""
    settled = words.settle(offsets)
    row = np.searchsorted(rows, settled, side="right") - 1
    begins_line = (settled < words.length) & (words.settle(rows)[row] == settled)
    return np.where(begins_line, rows[row], settled)


def sealed_pieces(firsts: Offsets, words: TextWords, rows: Offsets, openings: Offsets) -> Pieces:
    """Pieces of whole lines, of which ``firsts`` are the starts (the first is 0)."""
    starts = settle_at_lines(firsts, words, rows)
    return Pieces(starts[1:], settle_at_lines(openings, words, rows), np.append(0, starts[1:]))


def line_pieces(text: str, words: TextWords, max_words: int) -> Pieces:
    """The text in stretches of lines, cut at blank ones first."""
    rows = row_starts(text)
    firsts = cut_rows(words_before(words, rows), levels_by_blank_lines(text, rows), max_words)
    return sealed_pieces(rows[firsts], words, rows, np.empty(0, np.int64))
