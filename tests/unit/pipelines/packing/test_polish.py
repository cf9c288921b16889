"""Swap polish: never easier, same items, and each exchange as good as the formula says."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.packing import polish
from pipelines.packing.polish import affinities, polish_batches

NEAREST = 1e-3


def polished(batches: NDArray[np.int64], *, queries: Any, documents: Any, sweeps: int) -> NDArray[np.int64]:
    return polish_batches(batches, lambda items: (queries[items], documents[items]), sweeps)


def eq2(batches: NDArray[np.int64], *, queries: NDArray[np.floating], documents: NDArray[np.floating]) -> float:
    """Half of Eq. 2, pair by pair: the sum over i, j of one batch of d_i·q_j, without what eq. 4 masks."""
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    return sum(
        float(d[i] @ q[j]) for batch in batches for i in batch for j in batch if i == j or d[i] @ q[j] < d[j] @ q[j]
    )


def draw(items: int, dimension: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unit vectors; no document is so near a query's own that rounding decides which of the two is nearer."""
    random = np.random.default_rng(seed)
    while True:
        documents = random.standard_normal((items, dimension))
        queries = documents + 0.5 * random.standard_normal((items, dimension))
        sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (queries, documents)]
        scores = sides[1] @ sides[0].T
        if np.abs(scores - scores.diagonal())[~np.eye(items, dtype=bool)].min(initial=1) > NEAREST:
            return sides[0].astype(np.float32), sides[1].astype(np.float32)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(2, 5), st.integers(3, 6), st.integers(1, 4), st.integers(0, 999))
def test_monotone_and_a_permutation(count: int, size: int, dimension: int, sweeps: int, seed: int) -> None:
    queries, documents = draw(count * size, dimension, seed)
    batches = np.random.default_rng(seed).permutation(count * size).reshape(count, size)
    before, totals = batches.copy(), [eq2(batches, queries=queries, documents=documents)]
    for number in range(1, sweeps + 1):
        found = polished(batches, queries=queries, documents=documents, sweeps=number)
        assert np.sort(found, axis=None).tolist() == list(range(count * size))
        assert found.shape == batches.shape
        totals.append(eq2(found, queries=queries, documents=documents))
    np.testing.assert_array_equal(batches, before)  # the argument is not changed
    assert np.all(np.diff(totals) >= -1e-2)


def literal_sweep(start: NDArray[np.int64], **sides: NDArray[np.float32]) -> NDArray[np.int64]:
    """Place by place, the exchange with another batch that gains the most, where one gains anything."""
    found = start.copy()
    flat, size = found.reshape(-1), start.shape[1]
    for place in range(len(flat)):
        totals = np.full(len(flat), -np.inf)
        for partner in range(len(flat)):
            if partner // size != place // size:
                flat[[place, partner]] = flat[[partner, place]]
                totals[partner] = eq2(found, **sides)
                flat[[place, partner]] = flat[[partner, place]]
        best = int(totals.argmax())
        if totals[best] > eq2(found, **sides):
            flat[[place, best]] = flat[[best, place]]
    return found


def test_a_sweep_takes_the_best_exchange_of_every_place_in_turn() -> None:
    for seed in range(4):
        queries, documents = draw(9, 5, seed)
        start = np.random.default_rng(seed).permutation(9).reshape(3, 3)
        expected = literal_sweep(start, queries=queries, documents=documents)
        np.testing.assert_array_equal(polished(start, queries=queries, documents=documents, sweeps=1), expected)


def test_ends_where_no_exchange_gains() -> None:
    queries, documents = draw(12, 3, seed=4)
    found = polished(np.arange(12).reshape(3, 4), queries=queries, documents=documents, sweeps=50)
    best = eq2(found, queries=queries, documents=documents)
    flat = found.ravel()
    for i in range(12):
        for j in range(i):
            swapped = flat.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert eq2(swapped.reshape(3, 4), queries=queries, documents=documents) <= best + 4e-3


def alike(topics: list[int]) -> NDArray[np.float32]:
    """A vector for each: those of one topic are near one another, each nearest to itself."""
    vectors = np.concatenate([np.eye(8)[topics], 0.5 * np.eye(len(topics))], axis=1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_pairs_of_one_document_are_not_gathered_those_of_one_topic_are() -> None:
    """Each would mask the others' document: of the four of one document every batch has two, whatever the start."""
    topics = alike([0, 1, 2, 3, 0, 1, 2, 3])
    queries, documents = topics.copy(), topics.copy()
    documents[[4, 5, 6, 7]] = documents[[0, 1, 2, 3]]
    queries[[4, 5, 6, 7]] = queries[[0, 1, 2, 3]]
    start = np.array([[0, 4, 1, 5], [2, 6, 3, 7]])
    found = polished(start, queries=queries, documents=documents, sweeps=3)
    np.testing.assert_array_equal(found, start)  # nothing is gained by any exchange
    near = alike([0, 0, 1, 1])  # the second of each topic is a hard negative of the first, its copy is none
    both = near[[0, 0, 1, 2, 2, 3]]
    found = polished(np.array([[0, 1], [2, 3], [4, 5]]), queries=both, documents=both, sweeps=9)
    assert frozenset({0, 1}) not in {frozenset(batch) for batch in found.tolist()}
    near = alike([0, 0, 1, 1])
    start = np.array([[0, 2], [1, 3]])
    found = polished(start, queries=near, documents=near, sweeps=2).tolist()
    assert {frozenset(batch) for batch in found} == {frozenset({0, 1}), frozenset({2, 3})}


def test_sorts_two_topics_apart_across_the_borders_of_the_first_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = alike([0, 1, 0, 1, 0, 1, 0, 1]).astype(np.float16)
    found = polished(np.arange(8).reshape(2, 4), queries=topics, documents=topics, sweeps=2)
    assert {frozenset(batch) for batch in found.tolist()} == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    zeros = np.zeros((6, 3), dtype=np.float32)
    start = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(polished(start, queries=zeros, documents=zeros, sweeps=3), start)
    read: list[int] = []
    polish_batches(start, lambda items: read.append(len(items)) or (zeros[items], zeros[items]), 9)
    assert sum(read) == 2 * start.size  # two sweeps of nothing are the last
    monkeypatch.setattr(polish, "WINDOW_ITEMS", 5)
    topics = alike([0, 0, 1, 2, 1, 3, 4, 5])  # 2 and 4 are alike, in the batches 1 and 2
    start = np.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(polished(start, queries=topics, documents=topics, sweeps=1), start)
    found = polished(start, queries=topics, documents=topics, sweeps=2)
    assert {frozenset(batch) for batch in found.tolist()} >= {frozenset({0, 1}), frozenset({2, 4})}


@pytest.mark.parametrize(("count", "even", "odd"), [
    (11, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]], [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [10]]),
    (2, [[0, 1]], [[0, 1]]),
    (1, [[0]], [[0]]),
])  # fmt: skip
def test_windows_of_every_other_sweep_straddle_the_borders_of_the_others(count, even, odd, monkeypatch) -> None:
    seen: list[list[int]] = []

    def see(windows: NDArray[np.int64], *_: Any) -> int:
        seen.extend(windows[:, :, 0].tolist())
        return 1

    monkeypatch.setattr(polish, "WINDOW_BATCHES", 4)
    monkeypatch.setattr(polish, "_polish_windows", see)
    polish_batches(np.repeat(np.arange(count), 3).reshape(-1, 3), lambda _: ([], []), 3)  # type: ignore[arg-type, return-value]
    assert sorted(seen) == sorted(2 * even + odd)


def test_affinities_do_not_depend_on_the_order_of_addition() -> None:
    random = np.random.default_rng(1)
    queries, documents = (random.standard_normal((300, 64)).astype(np.float32) for _ in range(2))
    queries += 2 * documents  # each query is nearest to its own document
    expected = documents.astype(np.float64) @ queries.T.astype(np.float64)
    scale = max(np.linalg.norm(side, axis=1).max() for side in (queries, documents)) ** 2 / 9
    queries, documents, expected = queries / scale**0.5, documents / scale**0.5, expected / scale
    assert (expected <= expected.diagonal()).all()
    found = affinities(queries=queries, documents=documents)
    longest = max(np.linalg.norm(side, axis=1).max() for side in (queries, documents))
    unit = (longest / (2.0**11.5 - 64**0.5 / 2 - 1)) ** 2
    np.testing.assert_allclose(found * unit, expected + expected.T, atol=2e-2)
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.abs(found).max() <= 2**24
    huge = affinities(queries=queries * 2.0**80, documents=documents * 2.0**80)
    np.testing.assert_array_equal(huge, found)
    for size in range(1, 200):  # there is room for components that are all rounded up
        even = affinities(queries=np.ones((2, size)), documents=np.ones((2, size)))
        assert 0.99 * 2**24 < even.max() <= 2**24
        assert even[0, 1] == 0
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(affinities(queries=queries[:, order], documents=documents[:, order]), found)


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 6), st.integers(0, 999))
def test_batches_grow_no_easier(count: int, size: int, sweeps: int, seed: int) -> None:
    queries, documents = draw(count * size, 6, seed)
    start = np.random.default_rng(seed).permutation(count * size).reshape(count, size)
    found = polished(start, queries=queries, documents=documents, sweeps=sweeps)
    before, after = (eq2(batches, queries=queries, documents=documents) for batches in (start, found))
    assert after >= before - 2e-3 * size**2 * count


def test_bytes_do_not_depend_on_threads_or_on_what_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = draw(600, 12, seed=3)
    start = np.random.default_rng(3).permutation(600).reshape(100, 6)
    expected = polished(start, queries=queries, documents=documents, sweeps=3)
    threads = torch.get_num_threads()
    for number, cells in ((1, 1), (2, 5 * 48**2), (3, 1 << 24)):
        monkeypatch.setattr(polish, "CELLS_AT_ONCE", cells)
        torch.set_num_threads(number)
        found = polished(start, queries=queries, documents=documents, sweeps=3)
        torch.set_num_threads(threads)
        np.testing.assert_array_equal(found, expected)
