"""Exact search by FAISS's product and a sum for each pair: the order, ties, and independence of what stands beside."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.retrieval import exact_search
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exact_search import pair_scores, search_stored
from raytriever.retrieval.top_k import Ranking, merge_rankings


def literal_ranking(queries: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
    """Every pair's score, sorted by (score descending, row ascending), padded."""
    every = np.tile(np.arange(len(documents)), (len(queries), 1))
    scores = pair_scores(queries, documents, every) if every.size else np.zeros(every.shape, np.float32)
    order = np.lexsort((every, -scores), axis=1)[:, :k]
    padding = ((0, 0), (0, k - order.shape[1]))
    return Ranking(
        np.pad(order, padding, constant_values=-1),
        np.pad(np.take_along_axis(scores, order, axis=1), padding, constant_values=-np.inf),
    )


def assert_same(found: Ranking, expected: Ranking) -> None:
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert found.rows.dtype == np.int64
    assert found.scores.dtype == np.float32


def shifted(ranking: Ranking, first_row: int) -> Ranking:
    return Ranking(np.where(ranking.rows < 0, -1, ranking.rows + first_row), ranking.scores)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(0, 9),
    documents=st.integers(0, 70),
    k=st.integers(1, 40),
)
def test_equals_a_literal_sort_with_many_ties(seed: int, queries: int, documents: int, k: int) -> None:
    generator = np.random.default_rng(seed)
    left = generator.integers(-1, 2, size=(queries, 3)).astype(np.float32)
    right = generator.integers(-1, 2, size=(documents, 3)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_search, "_MARGIN", 1)
        patch.setattr(exact_search, "_QUERIES_AT_ONCE", 4)
        assert_same(search_stored(left, right, k), literal_ranking(left, right, k))


def test_equals_float64_on_real_numbers() -> None:
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((1100, 100)).astype(np.float16)
    documents = generator.standard_normal((3000, 100)).astype(np.float32)
    found = search_stored(queries, documents, 25)
    products = queries.astype(np.float64) @ documents.T.astype(np.float64)
    np.testing.assert_allclose(found.scores, -np.sort(-products, axis=1)[:, :25], rtol=1e-5)
    np.testing.assert_allclose(found.scores, np.take_along_axis(products, found.rows, axis=1), rtol=1e-5)


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


@pytest.mark.parametrize("cuts", [[0, 1, 70, 8261, 9001], [0, 4500, 4500, 9001]])
def test_shards_merged_equal_one_search_to_the_last_bit(cuts: list[int]) -> None:
    generator = np.random.default_rng(2)
    queries = generator.standard_normal((65, 384)).astype(np.float32)
    documents = generator.standard_normal((9001, 384)).astype(np.float32)
    documents[4000:4500] = documents[generator.integers(0, 20, 500)]  # copies far from their originals tie
    queries[:20] = documents[:20]
    shards = [shifted(search_stored(queries, documents[a:b], 20), a) for a, b in pairwise(cuts)]
    whole = search_stored(queries, documents, 20)
    assert_same(merge_rankings(shards, 20), whole)
    assert_same(whole, literal_ranking(queries, documents, 20))


def test_a_query_scores_the_same_alone_and_in_company() -> None:
    generator = np.random.default_rng(3)
    queries = generator.standard_normal((130, 96)).astype(np.float32)
    documents = generator.standard_normal((2500, 96)).astype(np.float32)
    together = search_stored(queries, documents, 100)
    for place in (0, 64, 129):
        alone = search_stored(queries[place : place + 1], documents, 100)
        assert_same(alone, Ranking(together.rows[place : place + 1], together.scores[place : place + 1]))


def test_identical_documents_and_zero_queries_rank_by_row() -> None:
    documents = np.repeat(np.random.default_rng(4).standard_normal((1, 33)).astype(np.float32), 700, axis=0)
    queries = np.stack([documents[0], np.zeros(33, np.float32), -documents[0]])
    found = search_stored(queries, documents, 30)
    np.testing.assert_array_equal(found.rows, np.tile(np.arange(30), (3, 1)))
    assert all(len(np.unique(scores)) == 1 for scores in found.scores)


def test_memory_mapped_documents(tmp_path: Path) -> None:
    documents = np.random.default_rng(5).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    assert_same(search_stored(documents[:5], mapped, 7), search_stored(documents[:5], documents, 7))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_named(value: float) -> None:
    vectors = np.ones((9000, 4), dtype=np.float32)
    vectors[8500, 2] = value
    with pytest.raises(UserError, match=r"Vector 8500 of documents holds NaN or infinity"):
        search_stored(np.zeros((1, 4), dtype=np.float32), vectors, 1)
    with pytest.raises(UserError, match=r"Vector 8500 of queries"):
        search_stored(vectors, np.zeros((1, 4), dtype=np.float32), 1)


@pytest.mark.parametrize(
    ("queries", "documents", "k", "message"),
    [
        (np.full((1, 2), 3e18, np.float32), np.ones((1, 2), np.float32), 1, r"queries: a vector is 4\.24e\+18 long"),
        (np.ones((1, 2), np.float32), np.full((1, 2), 3e38, np.float32), 1, r"documents: a vector is inf long"),
        (np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), 1, "dimension 3, 4 is needed"),
        (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), 0, "k is 0"),
    ],
)
def test_wrong_input(queries: NDArray, documents: NDArray, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_stored(queries, documents, k)
