"""Re-ranking against a literal sort of inner products."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval import rerank as module
from retrieval.encoders.list_scorer import ListScorer
from retrieval.encoders.specification import ListScorerForm
from retrieval.indexes.top_k import Ranking
from retrieval.rerank import rerank, rerank_lists

SEEDS = st.integers(0, 2**32 - 1)


def some_candidates(generator: np.random.Generator, depth: int) -> Ranking:
    """Rows of 20 documents for 7 queries, up to ``depth`` of them."""
    rows = np.stack([generator.permutation(20)[:depth] for _ in range(7)]).astype(np.int64)
    for line, found in zip(rows, generator.integers(0, depth + 1, size=7), strict=True):
        line[found:] = -1
    return Ranking(rows, np.zeros(rows.shape, dtype=np.float32))


def assert_sorted(found: Ranking, query: int, scores: dict[int, float], k: int) -> None:
    """By score descending, then by row."""
    expected = sorted(scores, key=lambda row: (-scores[row], row))[:k]
    padding = k - len(expected)
    assert found.rows[query].tolist() == expected + [-1] * padding
    assert found.scores[query].tolist() == [scores[row] for row in expected] + [-np.inf] * padding


@settings(max_examples=60, deadline=None)
@given(
    SEEDS, st.integers(1, 12), st.integers(1, 14), st.integers(1, 3), st.sampled_from([1, 200, 10_000]),
    st.sampled_from([0, 2**40]),
)  # fmt: skip
def test_equals_a_literal_sort(seed: int, depth: int, k: int, vectors: int, bytes_at_once: int, first_row: int) -> None:
    generator = np.random.default_rng(seed)
    queries = generator.integers(-2, 3, size=(7, 3)).astype(np.float32)
    documents = generator.integers(-2, 3, size=(20, vectors, 3)).astype(np.float32)
    near = some_candidates(generator, depth)
    candidates = Ranking(np.where(near.rows < 0, -1, near.rows + first_row), near.scores)
    asked: list[NDArray[np.int64]] = []

    def fetch(wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(wanted)
        return documents[wanted - first_row] if vectors > 1 else documents[wanted - first_row, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BYTES_AT_ONCE", bytes_at_once)
        found = rerank(candidates, queries, fetch, k)
    for query, line in enumerate(candidates.rows):
        scores = {int(row): float((documents[row - first_row] @ queries[query]).max()) for row in line if row >= 0}
        assert_sorted(found, query, scores, k)
    assert all((np.diff(wanted) > 0).all() for wanted in asked)


@pytest.mark.parametrize("vectors", [1, 4])
def test_a_block_holds_as_many_queries_as_their_vectors_have_room(vectors, monkeypatch):
    """Candidates of queries are distinct, so each counts: 3 queries of 5 documents of 6 numbers a block, or less."""
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", 3 * 5 * 6 * 4 + 100)
    documents = np.random.default_rng(0).standard_normal((50, vectors, 6)).astype(np.float32)
    asked: list[int] = []

    def fetch(wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(len(wanted))
        return documents[wanted]

    rows = np.arange(50).reshape(10, 5)
    found = rerank(Ranking(rows, np.zeros(rows.shape, np.float32)), np.ones((10, 6), np.float32), fetch, 5)
    np.testing.assert_array_equal(np.sort(found.rows, axis=1), rows)
    exact = documents.sum(axis=2, dtype=np.float64).max(axis=1).astype(np.float32)
    np.testing.assert_array_equal(found.scores, exact[found.rows])
    assert asked == ([5, 15, 15, 15] if vectors == 1 else [5] * 10)


def random_scorer() -> ListScorer:
    scorer = ListScorer(ListScorerForm(layers=1, heads=1, width=4, dropout=0.5), 3)
    with torch.no_grad():
        scorer.out += torch.randn(scorer.out.shape, generator=torch.Generator().manual_seed(0))
    return scorer


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 14), st.sampled_from([1, 10_000, 1 << 20]))
def test_lists_are_ranked_by_the_scores_of_each_list_alone(seed: int, depth: int, k: int, bytes_at_once: int) -> None:
    generator, scorer = np.random.default_rng(seed), random_scorer()
    queries = generator.standard_normal((7, 3)).astype(np.float32)
    documents = generator.standard_normal((20, 3)).astype(np.float32)
    documents[9] = documents[4]  # equal vectors of two documents: equal scores, in the order of their rows
    candidates = some_candidates(generator, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BYTES_AT_ONCE", bytes_at_once)
        found = rerank_lists(candidates, queries, documents.__getitem__, scorer, k)
    assert scorer.training
    exact = random_scorer().double().eval()
    for query, line in enumerate(candidates.rows):
        chosen = np.sort(line[line >= 0])
        vectors = torch.from_numpy(np.concatenate([documents[chosen], np.zeros((1, 3))]))
        values = exact(torch.from_numpy(queries[query : query + 1]).double(), vectors, torch.arange(len(chosen))[None])
        scores = dict(zip(chosen.tolist(), values[0].detach().numpy().astype(np.float32).tolist(), strict=True))
        assert_sorted(found, query, scores, k)


def test_scores_that_are_no_numbers_are_refused() -> None:
    scorer = random_scorer()
    with torch.no_grad():
        scorer.norm.bias[0] = torch.nan
    candidates = Ranking(np.array([[1, -1]]), np.zeros((1, 2), dtype=np.float32))
    with pytest.raises(UserError, match="scores that are not finite numbers"):
        rerank_lists(candidates, np.ones((1, 3), np.float32), np.ones((2, 3), np.float32).__getitem__, scorer, 2)
