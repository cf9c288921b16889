"""Exact search by FAISS's product and a sum for each pair: what is its own (see test_every_exact_search.py)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from raytriever.retrieval import exact_search
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exact_search import pair_scores, search_stored
from raytriever.retrieval.top_k import Ranking


def test_nearly_every_query_is_proven_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    every = exact_search._score_all

    def counted(query: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
        asked.append(k)
        return every(query, documents, k)

    monkeypatch.setattr(exact_search, "_score_all", counted)
    generator = np.random.default_rng(1)
    documents = generator.standard_normal((20_000, 384)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    for k in (10, 100, 1000):
        search_stored(documents[:200], documents, k)
    assert len(asked) <= 6


def test_equals_a_sort_of_every_pairs_own_score() -> None:
    generator = np.random.default_rng(2)
    queries = generator.standard_normal((20, 384)).astype(np.float32)
    documents = generator.standard_normal((5000, 384)).astype(np.float32)
    documents[4000:4500] = documents[generator.integers(0, 20, 500)]  # copies far from their originals tie
    queries[:10] = documents[:10]
    found = search_stored(queries, documents, 20)
    rows = np.tile(np.arange(5000), (20, 1))
    scores = pair_scores(queries, documents, rows)
    order = np.lexsort((rows, -scores), axis=1)[:, :20]
    np.testing.assert_array_equal(found.rows, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, axis=1))


@pytest.mark.parametrize(
    ("queries", "documents", "k", "message"),
    [
        (np.full((1, 2), 3e18, np.float32), np.ones((1, 2), np.float32), 1, r"queries: a vector is 4\.24e\+18 long"),
        (np.ones((1, 2), np.float32), np.full((1, 2), 3e38, np.float32), 1, r"documents: a vector is inf long"),
    ],
)
def test_wrong_input(queries: NDArray, documents: NDArray, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_stored(queries, documents, k)
