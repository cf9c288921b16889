"""Pieces of a text that a chunk keeps whole, and packing them into chunks in their order."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from retrieval.words import Offsets, TextWords


def _none() -> Offsets:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Pieces:
    """A text as pieces one after the other; all offsets are in characters and not at white space behind a piece.

    ``ends``: where pieces end, never decreasing. ``openings``: where something begins that a new chunk had better begin
    with. ``sealed``: starts of the pieces that are not cut, however long, 0 for the first.
    """

    ends: Offsets
    openings: Offsets = field(default_factory=_none)
    sealed: Offsets = field(default_factory=_none)


@dataclass(frozen=True)
class CountedPieces:
    """Pieces that each hold a word, none of them longer than a chunk but for sealed ones.

    ``words``: (pieces + 1,) words before each piece, and at the end. ``openings``: numbers of pieces, increasing.
    """

    ends: Offsets
    words: NDArray[np.int64]
    openings: Offsets
    cut: int  # pieces that were cut by words
    too_long: int  # sealed pieces of more than the words of a chunk


def count_pieces(pieces: Pieces, words: TextWords, max_words: int) -> CountedPieces:
    """Counts words, and cuts what is too long for a chunk by words."""
    # white space before all else belongs to the first piece
    ends = np.concatenate([pieces.ends[pieces.ends > words.first], [words.length]])
    ends = ends[np.append(ends[1:] > ends[:-1], True)]
    word_starts = words.word_starts(ends)
    before = np.append(0, np.searchsorted(word_starts, ends))
    long = np.flatnonzero(np.diff(before) > max_words)
    cut = too_long = 0
    if len(long):
        is_sealed = np.isin(np.append(0, ends[:-1])[long], pieces.sealed)
        too_long, cut = int(is_sealed.sum()), int((~is_sealed).sum())
        cuts = [word_starts[before[piece] + max_words : before[piece + 1] : max_words] for piece in long[~is_sealed]]
        ends = np.sort(np.concatenate([ends, *cuts]))
        before = np.append(0, np.searchsorted(word_starts, ends))
    openings = np.flatnonzero(np.isin(ends[:-1], pieces.openings)) + 1  # none comes before the first piece
    return CountedPieces(ends, before, openings, cut, too_long)


def pack_pieces(words: Sequence[int], openings: Sequence[int], max_words: int, min_words: int) -> list[int]:
    """Gathers pieces greedily. Returns for each chunk the number of the piece after its last.

    ``words``: words before each piece, and at the end. ``openings``: numbers of pieces that begin a new chunk once the
    one before holds ``min_words``. A last chunk of fewer than ``min_words`` takes the fewest pieces from the one before
    it that give both so many.
    """
    pieces = len(words) - 1
    bounds = [0]
    while bounds[-1] < pieces:
        first = bounds[-1]
        stop = max(first + 1, bisect_right(words, words[first] + max_words, first) - 1)
        if openings:
            enough = bisect_left(words, words[first] + max(1, min_words), first)
            opening = bisect_left(openings, enough)
            stop = min(stop, openings[opening]) if opening < len(openings) else stop
        bounds.append(stop)
    if len(bounds) > 2 and words[-1] - words[bounds[-2]] < min_words:
        _balance_tail(bounds, words, max_words, min_words)
    return bounds[1:]


def _balance_tail(bounds: list[int], words: Sequence[int], max_words: int, min_words: int) -> None:
    first = bounds[-3]
    if words[-1] - words[first] <= max_words:
        del bounds[-2]
        return
    split = bisect_right(words, words[-1] - min_words) - 1
    if words[split] - words[first] >= min_words:  # which is more than the last chunk lacks, so that it has room
        bounds[-2] = split


# Cutting at lines alone: the rows of a text, and how to cut a stretch of them at the best places there are.

AFTER_BLANK = 100  # levels: the lower, the sooner a cut is made before that row
ANY = 101

_LINE_END = re.compile(r"\r\n|\n|\r")


def row_starts(text: str) -> Offsets:
    """The start of each line, an empty one at the end too. A line ends with a line feed, a carriage return or both."""
    return np.array([0, *(end.end() for end in _LINE_END.finditer(text))])


def levels_by_blank_lines(text: str, rows: Offsets) -> NDArray[np.int64]:
    """``AFTER_BLANK`` for each row behind a blank one, ``ANY`` for the others."""
    levels = np.full(len(rows), ANY)
    was_blank = False
    for row, (start, stop) in enumerate(pairwise([*rows.tolist(), len(text)])):
        if was_blank:
            levels[row] = AFTER_BLANK
        was_blank = text[start:stop].isspace()
    return levels


def cut_rows(
    before: NDArray[np.int64], levels: NDArray[np.int64], max_words: int, sections: Sequence[int] = ()
) -> list[int]:
    """The first rows of the pieces: a stretch of more than ``max_words`` is cut before its rows of the lowest level.

    A single row is never cut. ``before`` (rows + 1,): words before each row, and at the end. ``levels`` (rows,).
    ``sections``: rows above 0, increasing, that always begin a piece.
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
    starts = words.word_starts(_none())
    return np.append(np.searchsorted(starts, rows), len(starts))


def after_space_at_lines(offsets: Offsets, words: TextWords, rows: Offsets) -> Offsets:
    """Moves offsets over white space as ``TextWords.after_space``, but leaves a line its indentation."""
    moved = words.after_space(offsets)
    row = np.searchsorted(rows, moved, side="right") - 1
    begins_line = (moved < words.length) & (words.after_space(rows)[row] == moved)
    return np.where(begins_line, rows[row], moved)


def sealed_pieces(firsts: Offsets, words: TextWords, rows: Offsets, openings: Offsets) -> Pieces:
    """Pieces of whole lines that start at ``firsts`` (the first is 0)."""
    starts = after_space_at_lines(firsts, words, rows)
    return Pieces(starts[1:], after_space_at_lines(openings, words, rows), np.append(0, starts[1:]))


def line_pieces(text: str, words: TextWords, max_words: int) -> Pieces:
    """The text in stretches of lines, cut at blank ones first."""
    rows = row_starts(text)
    firsts = cut_rows(words_before(words, rows), levels_by_blank_lines(text, rows), max_words)
    return sealed_pieces(rows[firsts], words, rows, _none())
