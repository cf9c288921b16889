"""Re-ranking against a literal sort of inner products."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.retrieval import rerank as module
from raytriever.retrieval.rerank import rerank
from raytriever.retrieval.top_k import Ranking, exact_top_k


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 12),
    k=st.integers(1, 14),
    vectors=st.integers(1, 3),
    bytes_at_once=st.sampled_from([1, 200, 10_000]),
)
def test_equals_a_literal_sort(seed: int, depth: int, k: int, vectors: int, bytes_at_once: int) -> None:
    generator = np.random.default_rng(seed)
    queries = generator.integers(-2, 3, size=(7, 3)).astype(np.float32)
    documents = generator.integers(-2, 3, size=(20, vectors, 3)).astype(np.float32)
    rows = np.stack([generator.permutation(20)[:depth] for _ in queries]).astype(np.int64)
    for line, found in zip(rows, generator.integers(0, depth + 1, size=7), strict=True):
        line[found:] = -1
    asked: list[NDArray[np.int64]] = []

    def fetch(wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(wanted)
        return documents[wanted] if vectors > 1 else documents[wanted, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BYTES_AT_ONCE", bytes_at_once)
        found = rerank(Ranking(rows, np.zeros(rows.shape, dtype=np.float32)), queries, fetch, k)
    for query, line in enumerate(rows):
        scores = {int(row): float((documents[row] @ queries[query]).max()) for row in line if row >= 0}
        expected = sorted(scores, key=lambda row: (-scores[row], row))[:k]
        assert found.rows[query].tolist() == expected + [-1] * (k - len(expected))
        assert found.scores[query].tolist() == [scores[row] for row in expected] + [-np.inf] * (k - len(expected))
    assert all((np.diff(wanted) > 0).all() for wanted in asked)


def test_candidates_that_hold_the_best_give_the_exact_ranking() -> None:
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((30, 48)).astype(np.float32)
    documents = generator.standard_normal((500, 48)).astype(np.float32)
    exact = exact_top_k(queries, documents, 50)
    shuffled = generator.permuted(exact_top_k(queries, documents, 200).rows, axis=1)
    found = rerank(Ranking(shuffled, np.zeros(shuffled.shape, dtype=np.float32)), queries, documents.__getitem__, 50)
    np.testing.assert_array_equal(found.rows, exact.rows)
    np.testing.assert_allclose(found.scores, exact.scores, rtol=1e-5)
