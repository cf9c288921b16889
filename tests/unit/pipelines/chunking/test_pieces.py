"""Packing pieces: greedy up to the limit, better places to begin, no tiny tail."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking.pieces import pack_pieces


def packed(sizes: list[int], openings: list[int], most: int, least: int) -> list[list[int]]:
    stops = pack_pieces([0, *accumulate(sizes)], openings, most, least)
    return [sizes[first:stop] for first, stop in pairwise([0, *stops])]


@pytest.mark.parametrize(("sizes", "openings", "least", "expected"), [
    ([4, 4, 4, 4], [], 0, [[4, 4], [4, 4]]),
    ([5, 5, 1], [], 0, [[5, 5], [1]]),
    ([3, 3, 3, 2], [], 3, [[3, 3], [3, 2]]),  # the tail takes as little as does
    ([9, 1, 1], [], 3, [[9, 1], [1]]),  # no place leaves both with three
    ([4, 6, 2], [], 3, [[4], [6, 2]]),
    ([5, 3, 1], [1, 2], 2, [[5], [3, 1]]),  # a short tail joins what has room
    ([1, 3, 3], [1, 2], 2, [[1, 3], [3]]),  # nothing begins before the chunk holds enough
    ([20, 1], [], 0, [[20], [1]]),
])  # fmt: skip
def test_examples(sizes: list[int], openings: list[int], least: int, expected: list[list[int]]) -> None:
    assert packed(sizes, openings, 10, least) == expected


@given(st.lists(st.integers(1, 12), min_size=1), st.sets(st.integers(0, 30)), st.integers(0, 5))
def test_chunks_hold_the_limit_and_break_only_where_they_must(
    sizes: list[int], opening_set: set[int], least: int
) -> None:
    openings = sorted(opening for opening in opening_set if opening < len(sizes))
    chunks = packed(sizes, openings, 10, least)
    assert [size for chunk in chunks for size in chunk] == sizes
    assert all(sum(chunk) <= 10 or len(chunk) == 1 for chunk in chunks)
    place = 0
    for chunk, following in pairwise(chunks[:-1]):
        place += len(chunk)
        assert sum(chunk) + following[0] > 10 or (place in openings and sum(chunk) >= least) or following == chunks[-2]
    if len(chunks) > 1 and sum(chunks[-1]) < least:
        assert sum(chunks[-2]) + sum(chunks[-1]) > 10
