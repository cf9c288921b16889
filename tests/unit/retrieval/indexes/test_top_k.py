"""The defined order; what is each exact search's own (see test_exact_search.py); fusion by its formula."""

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes import exact_search, top_k
from retrieval.indexes.exact_search import exact_top_k, pair_scores, search_stored
from retrieval.indexes.top_k import Ranking, best_of_documents, merge_rankings, reciprocal_rank_fusion
from tests.unit.retrieval.indexes.rankings import assert_same


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_QUERY_TILES": (2, 4), "_DOCUMENT_TILE": 8, "_DOCUMENT_BYTES_AT_ONCE": 300}.items():
        monkeypatch.setattr(exact_search, name, size)
    monkeypatch.setattr(top_k, "CANDIDATES_AT_ONCE", 40)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("width", "step"), [(0, 40), (1, 40), (20, 2), (21, 1), (40, 1), (41, 1)])
def test_blocks_hold_as_many_candidates_as_are_sorted_at_once(width: int, step: int) -> None:
    assert list(top_k.query_blocks(80, width)) == [slice(start, start + step) for start in range(0, 80, step)]


def test_order_of_every_kind_of_float() -> None:
    above = np.nextafter(np.float32(1), np.float32(2))
    values = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, above, 1.0]
    found = top_k.best_candidates(np.array([values], dtype=np.float32), np.arange(10)[None], 10)
    assert found.rows.tolist() == [[6, 8, 4, 9, 2, 0, 1, 3, 5, 7]]
    assert found.scores[0, 0] == np.float32(3e38)
    assert found.scores[0, -1] == np.float32(-3e38)
    both = np.array([values, values[::-1]], dtype=np.float32)
    near, far = (top_k.best_candidates(both, np.arange(20).reshape(2, 10) + first, 7) for first in (0, 2**40))
    assert_same(far, Ranking(near.rows + 2**40, near.scores))
    scores = torch.tensor([-0.0, 0.0, -0.0])
    keys = exact_search.order_keys(scores, torch.arange(3))
    assert torch.argsort(keys, descending=True).tolist() == [0, 1, 2]


@pytest.mark.usefixtures("small_blocks")
def test_another_default_device_changes_nothing() -> None:
    generator = np.random.default_rng(4)
    queries, documents = (generator.integers(-1, 2, size=(n, 3)).astype(np.float16) for n in (5, 20))
    found = exact_top_k(queries, documents, 25)
    with torch.device("meta"):  # for tensors that name none
        assert_same(exact_top_k(queries, documents, 25), found)


def test_rows_beyond_a_keys_are_fused_and_joined_alike() -> None:
    def moved(ranking: Ranking, by: int) -> Ranking:
        return Ranking(np.where(ranking.rows < 0, -1, ranking.rows + by), ranking.scores)

    scores = np.array([[0.5, 0.25, -np.inf]], dtype=np.float32)
    near = [Ranking(np.array([[3, 2, -1]]), scores), Ranking(np.array([[2, 4, -1]]), scores)]
    far = [moved(ranking, 2**40) for ranking in near]
    assert_same(reciprocal_rank_fusion(far, depth=5), moved(reciprocal_rank_fusion(near, depth=5), 2**40))
    assert_same(best_of_documents(far[0], 2, 3), moved(best_of_documents(near[0], 2, 3), 2**39))
    assert best_of_documents(near[0], 2, 3).rows.tolist() == [[1, -1, -1]]


def test_merge_pads_and_cuts() -> None:
    short = Ranking(np.array([[4, -1]]), np.array([[0.5, -np.inf]], dtype=np.float32))
    other = Ranking(np.array([[2, 9, 7]]), np.array([[0.5, 0.5, 0.25]], dtype=np.float32))
    assert merge_rankings([short, other], 6).rows.tolist() == [[2, 4, 9, 7, -1, -1]]
    assert merge_rankings([short, other], 6).scores.tolist() == [[0.5, 0.5, 0.5, 0.25, -np.inf, -np.inf]]
    assert merge_rankings([short, other], 2).rows.tolist() == [[2, 4]]
    assert merge_rankings([other], 2).rows.tolist() == [[2, 9]]
    nothing = top_k.best_candidates(np.zeros((3, 0), np.float32), np.zeros((3, 0), np.int64), 2)
    assert nothing.rows.shape == (3, 2)
    assert set(map(tuple, (nothing.rows.ravel(), nothing.scores.ravel()))) == {(-1,) * 6, (-np.inf,) * 6}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_order_is_the_same() -> None:
    generator = np.random.default_rng(5)
    queries = generator.integers(-3, 4, size=(70, 16)).astype(np.float32)
    documents = generator.integers(-3, 4, size=(70_000, 16)).astype(np.float16)
    assert_same(exact_top_k(queries, documents, 50, device="cuda"), exact_top_k(queries, documents, 50))


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


def count_full_scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each query that has all documents scored."""
    asked: list[int] = []
    every = exact_search._score_all

    def counted(queries: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
        asked.append(k)
        return every(queries, documents, k)

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


def test_more_documents_than_a_key_has_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_search, "LOW_BITS", 3)
    with pytest.raises(UserError, match=r"4 documents are more than one search takes \(3\)"):
        exact_top_k(np.ones((1, 2), dtype=np.float32), np.ones((4, 2), dtype=np.float32), 1)
