"""Swap polish: never easier, same items, and each exchange as good as the formula says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.packing import polish
from pipelines.packing.polish import affinities, polish_batches


def polished(
    batches: NDArray[np.int64], documents: NDArray[np.floating], queries: NDArray[np.floating], sweeps: int
) -> NDArray[np.int64]:
    return polish_batches(batches, lambda items: (documents[items], queries[items]), sweeps).batches


def eq2(batches: NDArray[np.int64], documents: NDArray[np.floating], queries: NDArray[np.floating]) -> float:
    """Half of Eq. 2, pair by pair: the sum over i, j of one batch of d_i·q_j."""
    d, q = documents.astype(np.float64), queries.astype(np.float64)
    return sum(float(d[i] @ q[j]) for batch in batches for i in batch for j in batch)


def draw(items: int, dimension: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    documents = random.standard_normal((items, dimension))
    queries = documents + 0.5 * random.standard_normal((items, dimension))
    sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (documents, queries)]
    return sides[0].astype(np.float32), sides[1].astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(2, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_monotone_and_a_permutation(count: int, size: int, dimension: int, sweeps: int, seed: int) -> None:
    documents, queries = draw(count * size, dimension, seed)
    batches = np.random.default_rng(seed).permutation(count * size).reshape(count, size)
    before, totals = batches.copy(), [eq2(batches, documents, queries)]
    for number in range(1, sweeps + 1):
        found = polished(batches, documents, queries, number)
        assert np.sort(found, axis=None).tolist() == list(range(count * size))
        assert found.shape == batches.shape
        totals.append(eq2(found, documents, queries))
    np.testing.assert_array_equal(batches, before)  # the argument is not changed
    assert np.all(np.diff(totals) >= -1e-2)


def test_ends_where_no_exchange_gains() -> None:
    documents, queries = draw(12, 3, seed=4)
    found = polished(np.arange(12).reshape(3, 4), documents, queries, 50)
    best = eq2(found, documents, queries)
    flat = found.ravel()
    for i in range(12):
        for j in range(i):
            swapped = flat.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert eq2(swapped.reshape(3, 4), documents, queries) <= best + 4e-3


def test_sorts_two_topics_apart() -> None:
    topics = np.eye(2, dtype=np.float16)[[0, 1, 0, 1, 0, 1, 0, 1]]
    found = polished(np.arange(8).reshape(2, 4), topics, topics, 2)
    assert {frozenset(batch) for batch in found.tolist()} == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}


def test_the_second_sweep_crosses_the_borders_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "WINDOW_BATCHES", 2)
    topics = np.eye(6, dtype=np.float32)[[0, 0, 1, 2, 1, 3, 4, 5]]  # 2 and 4 are alike, in the batches 1 and 2
    start = np.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(polished(start, topics, topics, 1), start)
    found = polished(start, topics, topics, 2)
    assert {frozenset(batch) for batch in found.tolist()} >= {frozenset({0, 1}), frozenset({2, 4})}


def test_affinities_do_not_depend_on_the_order_of_addition() -> None:
    documents, queries = draw(300, 64, seed=1)
    expected = documents.astype(np.float64) @ queries.T.astype(np.float64)
    found, unit = affinities(documents, queries)
    np.testing.assert_allclose(found * unit, expected + expected.T, atol=2e-3)
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.abs(found).max() <= 2**24
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(affinities(documents[:, order], queries[:, order])[0], found)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 30), st.integers(2, 5), st.integers(1, 3), st.integers(0, 999))
def test_figures_are_those_of_the_batches(count: int, size: int, sweeps: int, seed: int) -> None:
    documents, queries = draw(count * size, 6, seed)
    start = np.random.default_rng(seed).permutation(count * size).reshape(count, size)
    found = polish_batches(start, lambda items: (documents[items], queries[items]), sweeps)
    own = float(np.einsum("ij,ij->", documents, queries))
    assert found.before == pytest.approx(eq2(start, documents, queries) - own, abs=2e-3 * size**2 * count)
    assert found.after == pytest.approx(eq2(found.batches, documents, queries) - own, abs=2e-3 * size**2 * count)
    assert len(found.swaps) <= sweeps
    assert (found.after > found.before) == (sum(found.swaps) > 0)


def test_bytes_do_not_depend_on_threads_or_on_what_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, queries = draw(600, 12, seed=3)
    start = np.random.default_rng(3).permutation(600).reshape(100, 6)
    expected = polished(start, documents, queries, 3)
    threads = torch.get_num_threads()
    for number, cells in ((1, 1), (2, 5 * 48**2), (3, 1 << 24)):
        monkeypatch.setattr(polish, "CELLS_AT_ONCE", cells)
        torch.set_num_threads(number)
        found = polished(start, documents, queries, 3)
        torch.set_num_threads(threads)
        np.testing.assert_array_equal(found, expected)


def test_vectors_of_nothing_change_nothing() -> None:
    zeros = np.zeros((6, 3), dtype=np.float32)
    start = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(polished(start, zeros, zeros, 3), start)
