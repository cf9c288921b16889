"""The defined order of rankings, written out; and that two are the same to the last bit."""

import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.top_k import Ranking


def assert_same(found: Ranking, expected: Ranking) -> None:
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert found.rows.dtype == np.int64
    assert found.scores.dtype == np.float32


def assert_ordered(found: Ranking) -> None:
    """Score descending, then row ascending, no row twice, padding last."""
    for rows, scores in zip(found.rows.tolist(), found.scores.tolist(), strict=True):
        pairs = [(-score, row) for row, score in zip(rows, scores, strict=True) if row >= 0]
        assert pairs == sorted(set(pairs))
        assert rows[len(pairs) :] == [-1] * (len(rows) - len(pairs))
        assert scores[len(pairs) :] == [-np.inf] * (len(rows) - len(pairs))


def literal_ranking(scores: NDArray[np.float32], k: int, first_row: int = 0) -> Ranking:
    """Python's sort by (score descending, row ascending), padded; rows count from ``first_row``."""
    rows = np.full((len(scores), k), -1)
    best = np.full((len(scores), k), -np.inf, dtype=np.float32)
    for number, line in enumerate(scores.tolist()):
        order = sorted(range(len(line)), key=lambda row: (-line[row], row))[:k]
        rows[number, : len(order)] = [first_row + row for row in order]
        best[number, : len(order)] = scores[number, order]
    return Ranking(rows, best)
