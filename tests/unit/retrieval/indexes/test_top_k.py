"""The defined order and torch's exact search: what is its own (see test_every_exact_search.py)."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from retrieval.indexes import exact_search, top_k
from retrieval.indexes.exact_search import exact_top_k
from retrieval.indexes.top_k import Ranking, merge_rankings


def assert_same(a: Ranking, b: Ranking) -> None:
    np.testing.assert_array_equal(a.rows, b.rows)
    np.testing.assert_array_equal(a.scores, b.scores)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_search, "_QUERY_TILES", (2, 4))
    monkeypatch.setattr(exact_search, "_DOCUMENT_TILE", 8)
    monkeypatch.setattr(exact_search, "_DOCUMENT_BYTES_AT_ONCE", 300)
    monkeypatch.setattr(top_k, "CANDIDATES_AT_ONCE", 40)


def test_order_of_every_kind_of_float() -> None:
    values = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, np.nextafter(np.float32(1), np.float32(2)), 1.0]
    found = top_k.best_candidates(np.array([values], dtype=np.float32), np.arange(10)[None], 10)
    assert found.rows.tolist() == [[6, 8, 4, 9, 2, 0, 1, 3, 5, 7]]
    assert found.scores[0, 0] == np.float32(3e38)
    assert found.scores[0, -1] == np.float32(-3e38)


def test_signed_zeros_tie() -> None:
    scores = torch.tensor([-0.0, 0.0, -0.0])
    keys = exact_search.order_keys(scores, torch.arange(3))
    assert torch.argsort(keys, descending=True).tolist() == [0, 1, 2]


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


def test_uneven_shards_merged_equal_one_search_with_the_block_sizes_in_use() -> None:
    generator = np.random.default_rng(6)
    queries = generator.standard_normal((65, 384)).astype(np.float32)
    documents = generator.standard_normal((9001, 384)).astype(np.float16)
    cuts = [0, 1, 70, 8261, 9001]
    shards = [exact_top_k(queries, documents[start:stop], 20, first_row=start) for start, stop in pairwise(cuts)]
    assert_same(merge_rankings(shards, 20), exact_top_k(queries, documents, 20))


@pytest.mark.usefixtures("small_blocks")
def test_rows_count_from_the_first() -> None:
    generator = np.random.default_rng(4)
    queries, documents = (generator.integers(-1, 2, size=(n, 3)).astype(np.float16) for n in (5, 20))
    found, from_far = exact_top_k(queries, documents, 25), exact_top_k(queries, documents, 25, first_row=2**40)
    np.testing.assert_array_equal(from_far.rows, np.where(found.rows < 0, -1, found.rows + 2**40))
    np.testing.assert_array_equal(from_far.scores, found.scores)


def test_merge_pads_and_cuts() -> None:
    short = Ranking(np.array([[4, -1]]), np.array([[0.5, -np.inf]], dtype=np.float32))
    other = Ranking(np.array([[2, 9, 7]]), np.array([[0.5, 0.5, 0.25]], dtype=np.float32))
    assert merge_rankings([short, other], 6).rows.tolist() == [[2, 4, 9, 7, -1, -1]]
    assert merge_rankings([short, other], 6).scores.tolist() == [[0.5, 0.5, 0.5, 0.25, -np.inf, -np.inf]]
    assert merge_rankings([short, other], 2).rows.tolist() == [[2, 4]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_order_is_the_same() -> None:
    generator = np.random.default_rng(5)
    queries = generator.integers(-3, 4, size=(70, 16)).astype(np.float32)
    documents = generator.integers(-3, 4, size=(70_000, 16)).astype(np.float16)
    assert_same(exact_top_k(queries, documents, 50, device="cuda"), exact_top_k(queries, documents, 50))
