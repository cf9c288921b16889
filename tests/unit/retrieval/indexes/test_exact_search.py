"""What holds of both exact searches, torch's and FAISS's: the order, ties, independence of blocks and shards."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes import exact_search, top_k
from retrieval.indexes.exact_search import exact_top_k, search_stored
from retrieval.indexes.top_k import Ranking, merge_rankings
from tests.unit.retrieval.indexes.rankings import assert_same, literal_ranking

Search = Callable[[NDArray[np.float32], NDArray[np.float32], int], Ranking]
pytestmark = pytest.mark.parametrize("search", [exact_top_k, search_stored])


def vectors(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), queries=st.integers(0, 9), documents=st.integers(0, 70), k=st.integers(1, 40))
def test_equals_a_literal_sort_with_many_ties(search: Search, seed: int, queries: int, documents: int, k: int) -> None:
    generator = np.random.default_rng(seed)
    left = generator.integers(-1, 2, size=(queries, 3)).astype(np.float32)
    right = generator.integers(-1, 2, size=(documents, 3)).astype(np.float32)
    blocks = {"_QUERY_TILES": (2, 4), "_DOCUMENT_TILE": 8, "_DOCUMENT_BYTES_AT_ONCE": 300, "_MARGIN": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (blocks | {"_QUERIES_AT_ONCE": 4}).items():
            patch.setattr(exact_search, name, size)
        assert_same(search(left, right, k), literal_ranking(left @ right.T, k))


def test_equals_float64_on_real_numbers(search: Search) -> None:
    queries, documents = vectors(1100, 100).astype(np.float16), vectors(3000, 100, seed=1)
    found = search(queries, documents, 25)
    products = queries.astype(np.float64) @ documents.T.astype(np.float64)
    np.testing.assert_allclose(found.scores, -np.sort(-products, axis=1)[:, :25], rtol=1e-5)
    np.testing.assert_allclose(found.scores, np.take_along_axis(products, found.rows, axis=1), rtol=1e-5)


@pytest.mark.parametrize("cuts", [[0, 1, 70, 8261, 9001], [0, 4500, 4500, 9001]])
def test_shards_merged_equal_one_search_to_the_last_bit(search: Search, cuts: list[int], monkeypatch) -> None:
    queries, documents = vectors(65, 384), vectors(9001, 384, seed=1)
    copied = np.random.default_rng(2).integers(0, 20, 500)
    documents[4000:4500] = documents[copied]  # copies far from their originals tie
    queries[:20] = documents[:20]
    shards = []
    for start, stop in pairwise(cuts):
        found = search(queries, documents[start:stop], 20)
        shards.append(Ranking(np.where(found.rows < 0, -1, found.rows + start), found.scores))
    whole = search(queries, documents, 20)
    monkeypatch.setattr(top_k, "CANDIDATES_AT_ONCE", 40)
    for merged in (shards, shards[::-1], [merge_rankings(shards[:1], 20), *shards[1:]]):
        assert_same(merge_rankings(merged, 20), whole)


@pytest.mark.filterwarnings("error")
def test_a_query_scores_the_same_alone_in_company_and_against_mapped_documents(search: Search, tmp_path: Path) -> None:
    queries, documents = vectors(130, 96), vectors(2500, 96, seed=1)
    together = search(queries, documents, 500)
    for place in (0, 64, 129):
        alone = search(queries[place : place + 1], documents, 500)
        assert_same(alone, Ranking(together.rows[place : place + 1], together.scores[place : place + 1]))
    documents = vectors(300, 8)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    assert_same(search(documents[:5], mapped, 7), search(documents[:5], documents, 7))


def test_equal_vectors_have_equal_scores_wherever_they_stand(search: Search) -> None:
    documents = vectors(9000, 768)
    copies = [0, 1, 63, 4095, 8191, 8192, 8999]
    documents[copies] = documents[17]
    for queries in (1, 2, 67):
        found = search(np.repeat(documents[17:18], queries, axis=0), documents, 8)
        assert (found.rows == sorted([*copies, 17])).all()
        assert len(np.unique(found.scores)) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_are_named(search: Search, value: float) -> None:
    bad, good = np.ones((9000, 4), dtype=np.float32), np.zeros((1, 4), dtype=np.float32)
    bad[8500, 2] = value
    with pytest.raises(UserError, match=r"Vector 8500 of documents holds NaN or infinity"):
        search(good, bad, 1)
    with pytest.raises(UserError, match=r"Vector 8500 of queries"):
        search(bad, good, 1)
    huge = np.full((1, 4), 3e38, dtype=np.float32)  # finite, but not their product
    with pytest.raises(UserError, match=r"may exceed float32"):
        search(huge, huge, 1)
