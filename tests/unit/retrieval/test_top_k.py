"""Exact search: the defined order, ties at the cut, and independence of blocks and shards."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.retrieval import top_k
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.top_k import Ranking, exact_top_k, merge_rankings


def literal_top_k(products: NDArray[np.floating], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Python's sort by (score descending, row ascending), padded."""
    rows, scores = [], []
    for line in products.tolist():
        order = sorted(range(len(line)), key=lambda row: (-line[row], row))[:k]
        rows.append(order + [-1] * (k - len(order)))
        scores.append([line[row] for row in order] + [-np.inf] * (k - len(order)))
    return rows, scores


def assert_same(a: Ranking, b: Ranking) -> None:
    np.testing.assert_array_equal(a.rows, b.rows)
    np.testing.assert_array_equal(a.scores, b.scores)


def use_small_tiles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(top_k, "_QUERY_TILES", (2, 4))
    patch.setattr(top_k, "_DOCUMENT_TILE", 8)
    patch.setattr(top_k, "_DOCUMENT_BYTES_AT_ONCE", 300)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(top_k, "_CANDIDATES_AT_ONCE", 40)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(0, 9),
    documents=st.integers(0, 70),
    k=st.integers(1, 40),
    first_row=st.integers(0, 2**40),
)
def test_equals_a_literal_sort_with_many_ties(seed: int, queries: int, documents: int, k: int, first_row: int) -> None:
    generator = np.random.default_rng(seed)
    left = generator.integers(-1, 2, size=(queries, 3)).astype(np.float32)
    right = generator.integers(-1, 2, size=(documents, 3)).astype(np.float16)
    with pytest.MonkeyPatch.context() as patch:
        use_small_tiles(patch)
        found = exact_top_k(left, right, k, first_row=first_row)
    rows, scores = literal_top_k(left @ right.astype(np.float32).T, k)
    expected = np.array(rows, dtype=np.int64).reshape(queries, k)
    np.testing.assert_array_equal(found.rows, np.where(expected < 0, -1, expected + first_row))
    np.testing.assert_array_equal(found.scores, np.array(scores, dtype=np.float32).reshape(queries, k))
    assert found.rows.dtype == np.int64
    assert found.scores.dtype == np.float32


def test_order_of_every_kind_of_float() -> None:
    values = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.0,
        -1.0,
        3e38,
        -3e38,
        np.nextafter(np.float32(1), np.float32(2)),
        1.0,
    ]
    documents = np.array(values, dtype=np.float32)[:, None]
    found = exact_top_k(np.ones((1, 1), dtype=np.float32), documents, 10)
    assert found.rows.tolist() == [[6, 8, 4, 9, 2, 0, 1, 3, 5, 7]]
    assert found.scores[0, 0] == np.float32(3e38)
    assert found.scores[0, -1] == np.float32(-3e38)


def test_signed_zeros_tie() -> None:
    scores = torch.tensor([-0.0, 0.0, -0.0])
    keys = top_k._order_keys(scores, torch.arange(3))
    assert torch.argsort(keys, descending=True).tolist() == [0, 1, 2]


def test_real_numbers_against_float64() -> None:
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((70, 48)).astype(np.float32)
    documents = generator.standard_normal((20_000, 48)).astype(np.float32)
    found = exact_top_k(queries, documents, 25)
    products = queries.astype(np.float64) @ documents.astype(np.float64).T
    np.testing.assert_allclose(found.scores, -np.sort(-products, axis=1)[:, :25], rtol=1e-5)
    np.testing.assert_allclose(found.scores, np.take_along_axis(products, found.rows, axis=1), rtol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cuts", [[0, 1, 40, 300], [0, 150, 150, 300], [0, 299, 300]])
def test_shards_merged_equal_one_search_to_the_last_bit(cuts: list[int]) -> None:
    generator = np.random.default_rng(1)
    queries = generator.standard_normal((11, 7)).astype(np.float32)
    documents = generator.standard_normal((300, 7)).astype(np.float32)
    documents[100:200] = documents[generator.integers(0, 20, 100)]  # copies far from their originals tie
    whole = exact_top_k(queries, documents, 30)
    shards = [exact_top_k(queries, documents[start:stop], 30, first_row=start) for start, stop in pairwise(cuts)]
    assert_same(merge_rankings(shards, 30), whole)
    assert_same(merge_rankings(shards[::-1], 30), whole)
    assert_same(merge_rankings([merge_rankings(shards[:1], 30), *shards[1:]], 30), whole)


def test_equal_vectors_have_equal_scores_wherever_they_stand() -> None:
    generator = np.random.default_rng(2)
    documents = generator.standard_normal((9000, 768)).astype(np.float32)
    copies = [0, 1, 63, 4095, 8191, 8192, 8999]
    documents[copies] = documents[17]
    for queries in (1, 2, 67):
        question = np.repeat(documents[17:18], queries, axis=0)
        found = exact_top_k(question, documents, 8)
        assert (found.rows == sorted([*copies, 17])).all()
        assert len(np.unique(found.scores)) == 1


def test_uneven_shards_merged_equal_one_search_with_the_block_sizes_in_use() -> None:
    generator = np.random.default_rng(6)
    queries = generator.standard_normal((65, 384)).astype(np.float32)
    documents = generator.standard_normal((9001, 384)).astype(np.float16)
    cuts = [0, 1, 70, 8261, 9001]
    shards = [exact_top_k(queries, documents[start:stop], 20, first_row=start) for start, stop in pairwise(cuts)]
    assert_same(merge_rankings(shards, 20), exact_top_k(queries, documents, 20))


def test_a_query_scores_the_same_alone_and_in_company() -> None:
    generator = np.random.default_rng(3)
    queries = generator.standard_normal((130, 96)).astype(np.float32)
    documents = generator.standard_normal((500, 96)).astype(np.float32)
    together = exact_top_k(queries, documents, 500)
    for place in (0, 64, 129):
        alone = exact_top_k(queries[place : place + 1], documents, 500)
        np.testing.assert_array_equal(alone.scores[0], together.scores[place])


def test_memory_mapped_documents(tmp_path: Path) -> None:
    documents = np.random.default_rng(4).standard_normal((300, 8)).astype(np.float16)
    np.save(tmp_path / "vectors.npy", documents)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert_same(exact_top_k(documents[:5], mapped, 10), exact_top_k(documents[:5], documents, 10))


def test_merge_pads_and_cuts() -> None:
    short = Ranking(np.array([[4, -1]]), np.array([[0.5, -np.inf]], dtype=np.float32))
    other = Ranking(np.array([[2, 9, 7]]), np.array([[0.5, 0.5, 0.25]], dtype=np.float32))
    assert merge_rankings([short, other], 6).rows.tolist() == [[2, 4, 9, 7, -1, -1]]
    assert merge_rankings([short, other], 6).scores.tolist() == [[0.5, 0.5, 0.5, 0.25, -np.inf, -np.inf]]
    assert merge_rankings([short, other], 2).rows.tolist() == [[2, 4]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_documents_that_are_not_finite_are_named(value: float) -> None:
    documents = np.ones((9000, 4), dtype=np.float16)
    documents[8500, 2] = value
    with pytest.raises(UserError, match=r"Vector 8500 of documents holds NaN or infinity"):
        exact_top_k(np.zeros((1, 4), dtype=np.float32), documents, 1)
    with pytest.raises(UserError, match=r"Vector 8500 of queries"):
        exact_top_k(documents, np.zeros((1, 4), dtype=np.float32), 1)


def test_products_beyond_float32_are_refused() -> None:
    huge = np.full((1, 2), 3e38, dtype=np.float32)
    with pytest.raises(UserError, match=r"may exceed float32"):
        exact_top_k(huge, huge, 1)


@pytest.mark.parametrize(
    ("queries", "documents", "k", "message"),
    [
        (np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), 1, "dimension 4, 3 is needed"),
        (np.zeros(3, np.float32), np.zeros((2, 3), np.float32), 1, r"queries: shape \(3,\)"),
        (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float64), 1, "dtype float64"),
        (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), 0, "k is 0"),
    ],
)
def test_wrong_input(queries: NDArray, documents: NDArray, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        exact_top_k(queries, documents, k)


def test_merging_rankings_of_other_queries_is_refused() -> None:
    one = exact_top_k(np.ones((1, 2), np.float32), np.ones((1, 2), np.float32), 1)
    two = exact_top_k(np.ones((2, 2), np.float32), np.ones((1, 2), np.float32), 1)
    with pytest.raises(UserError, match=r"for \[1, 2\] queries"):
        merge_rankings([one, two], 1)
    with pytest.raises(UserError, match="0 rankings"):
        merge_rankings([], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_order_is_the_same() -> None:
    generator = np.random.default_rng(5)
    queries = generator.integers(-3, 4, size=(70, 16)).astype(np.float32)
    documents = generator.integers(-3, 4, size=(70_000, 16)).astype(np.float16)
    assert_same(exact_top_k(queries, documents, 50, device="cuda"), exact_top_k(queries, documents, 50))
