"""What is asserted of rankings: that two are the same to the last bit, and that one is in the defined order."""

import numpy as np

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
