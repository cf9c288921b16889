"""Pieces of a text that a chunk keeps whole, and packing them into chunks in their order."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.chunking.words import Offsets, TextWords


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
    openings = _none()
    if len(pieces.openings):
        openings = np.flatnonzero(np.isin(np.append(0, ends[:-1]), pieces.openings))
    return CountedPieces(ends, before, openings, cut, too_long)


def pack_pieces(words: Sequence[int], openings: Sequence[int], max_words: int, min_words: int) -> list[int]:
    """Gathers pieces greedily; returns for each chunk the number of the piece behind its last.

    ``words``: words before each piece, and at the end; ``openings``: numbers of pieces that begin a new chunk once the
    one before holds ``min_words``. A last chunk of fewer than ``min_words`` takes pieces from the one before it, as
    few as do, where both then hold at least so many.
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
    if words[split] - words[first] >= min_words and words[-1] - words[split] <= max_words:
        bounds[-2] = split
