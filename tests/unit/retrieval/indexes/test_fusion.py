"""Reciprocal rank fusion against its formula, written out."""

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.indexes import top_k
from retrieval.indexes.top_k import Ranking, reciprocal_rank_fusion


def ranking(rows: list[list[int]]) -> Ranking:
    array = np.array(rows, dtype=np.int64)
    scores = np.where(array < 0, -np.inf, -np.arange(array.shape[1], dtype=np.float64))
    return Ranking(array, scores.astype(np.float32))


def literal_fusion(lists: list[list[int]], k_constant: int, depth: int) -> list[tuple[int, Fraction]]:
    """Exact sums, sorted by (sum descending, row ascending)."""
    sums: dict[int, Fraction] = defaultdict(Fraction)
    for rows in lists:
        for rank, row in enumerate(rows[:depth], 1):
            if row >= 0:
                sums[row] += Fraction(1, k_constant + rank)
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:depth]


def one_list(values: list[int], width: int) -> list[int]:
    kept = list(dict.fromkeys(values))[:width]
    return kept + [-1] * (width - len(kept))


@settings(max_examples=80, deadline=None)
@given(
    data=st.lists(st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=3, max_size=3), min_size=1, max_size=4),
    k_constant=st.sampled_from([1, 2, 60]),
    depth=st.integers(1, 30),
    widths=st.lists(st.integers(1, 10), min_size=4, max_size=4),
)
def test_equals_the_formula_in_exact_fractions(data, k_constant, depth, widths):
    systems = [[one_list(values, width) for values in system] for system, width in zip(data, widths, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "CANDIDATES_AT_ONCE", 30)
        fused = reciprocal_rank_fusion([ranking(system) for system in systems], k_constant, depth)
    assert fused.rows.shape == fused.scores.shape == (3, depth)
    for query in range(3):
        expected = literal_fusion([system[query] for system in systems], k_constant, depth)
        padding = depth - len(expected)
        assert fused.rows[query].tolist() == [row for row, _ in expected] + [-1] * padding
        scores = [np.float32(float(total)) for _, total in expected] + [np.float32(-np.inf)] * padding
        np.testing.assert_array_equal(fused.scores[query], scores)


def test_worked_example() -> None:
    fused = reciprocal_rank_fusion([ranking([[7, 3, 5]]), ranking([[3, 9, -1]])])
    assert fused.rows[0, :5].tolist() == [3, 7, 9, 5, -1]
    np.testing.assert_allclose(fused.scores[0, :4], [1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63], rtol=1e-6)


def test_order_of_the_systems_does_not_matter() -> None:
    generator = np.random.default_rng(0)
    systems = [ranking([generator.permutation(300)[:100].tolist() for _ in range(50)]) for _ in range(5)]
    forward, backward = reciprocal_rank_fusion(systems), reciprocal_rank_fusion(systems[::-1])
    np.testing.assert_array_equal(forward.rows, backward.rows)
    np.testing.assert_array_equal(forward.scores, backward.scores)
