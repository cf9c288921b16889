"""Exact search by FAISS's product and a sum for each pair: what is its own (see test_every_exact_search.py)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes import exact_search
from retrieval.indexes.exact_search import pair_scores, search_stored
from retrieval.indexes.top_k import Ranking
from tests.unit.retrieval.indexes.rankings import assert_same


def count_full_scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each query that has all documents scored."""
    asked: list[int] = []
    every = exact_search._score_all

    def counted(query: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
        asked.append(k)
        return every(query, documents, k)

    monkeypatch.setattr(exact_search, "_score_all", counted)
    return asked


@pytest.fixture(scope="module")
def drawn() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Documents of length 1, and queries near the first 200 of them."""
    generator = np.random.default_rng(3)
    documents = generator.standard_normal((20_000, 384)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    return documents, documents[:200] + np.float32(0.02) * generator.standard_normal((200, 384)).astype(np.float32)


def test_nearly_every_query_is_proven_at_once(drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, (documents, _) = count_full_scans(monkeypatch), drawn
    for k in (10, 100, 1000):
        search_stored(documents[:200], documents, k)
    assert len(asked) <= 6


def test_one_long_document_sends_few_queries_to_the_full_scan(drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length widens the bound of every query: more than the next few documents have to be fetched."""
    documents, queries = drawn[0].copy(), drawn[1]
    documents[777] *= 100
    asked = count_full_scans(monkeypatch)
    found = search_stored(queries, documents, 10)
    assert len(asked) <= 10
    asked.clear()
    monkeypatch.setattr(exact_search, "_WIDER", 1)
    assert_same(found, search_stored(queries, documents, 10))
    assert len(asked) >= 100


def test_candidates_of_a_block_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(4)
    queries, documents = (generator.standard_normal((count, 16)).astype(np.float32) for count in (50, 2000))
    expected = search_stored(queries, documents, 100)
    shapes: list[tuple[int, ...]] = []
    score = exact_search.pair_scores

    def recorded(left: NDArray[np.float32], right: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        shapes.append(rows.shape)
        return score(left, right, rows)

    monkeypatch.setattr(exact_search, "pair_scores", recorded)
    monkeypatch.setattr(exact_search, "CANDIDATES_AT_ONCE", 1000)
    assert_same(search_stored(queries, documents, 100), expected)
    assert len(shapes) > 5
    assert all(queries * width <= 1000 or queries == 1 for queries, width in shapes)


def test_equals_a_sort_of_every_pairs_own_score() -> None:
    generator = np.random.default_rng(2)
    queries, documents = (generator.standard_normal((count, 384)).astype(np.float32) for count in (20, 5000))
    documents[4000:4500] = documents[generator.integers(0, 20, 500)]  # copies far from their originals tie
    queries[:10] = documents[:10]
    rows = np.tile(np.arange(5000), (20, 1))
    scores = pair_scores(queries, documents, rows)
    order = np.lexsort((rows, -scores), axis=1)[:, :20]
    assert_same(search_stored(queries, documents, 20), Ranking(order, np.take_along_axis(scores, order, axis=1)))


@pytest.mark.parametrize(("queries", "documents", "k", "message"), [
    (np.full((1, 2), 3e18, np.float32), np.ones((1, 2), np.float32), 1, r"queries: a vector is 4\.24e\+18 long"),
    (np.ones((1, 2), np.float32), np.full((1, 2), 3e38, np.float32), 1, r"documents: a vector is inf long"),
])  # fmt: skip
def test_wrong_input(queries: NDArray, documents: NDArray, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_stored(queries, documents, k)
