"""The steps of k-means: sums that hold every bit, whatever the parts, and points that count in either orientation."""

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.clustering import lloyd as refilling
from pipelines.clustering import points as parts_module
from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.lloyd import PartTask, assign, assign_part, cluster_sums, costliest_of_part, lloyd
from pipelines.clustering.pair_vectors import ArrayPairs, both_orientations
from pipelines.clustering.points import ConcatenatedPairs, Frame, LocalParts, MidPoints, Points, cut, midpoints

RANDOM = np.random.default_rng(11)


def unit_rows(*shape: int) -> NDArray[np.float32]:
    rows = RANDOM.standard_normal(shape)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def framed(kind: type[Points], count: int, dimension: int = 7, largest: float = 1.0) -> Points:
    queries, documents = largest * unit_rows(2, count, dimension)
    centre = None if kind.spherical else midpoints(queries=queries, documents=documents).mean(axis=0)
    frame = Frame.around(centre, 1.0 if kind.spherical else 2 * largest, count)
    return kind(ArrayPairs(queries=queries, documents=documents), frame)


@given(st.integers(1, 300), st.floats(1e-6, 1e6), st.integers(0, 99))
def test_sums_hold_every_bit(count: int, largest: float, seed: int) -> None:
    values = framed(MidPoints, count, 3, np.float32(largest)).take(slice(None)).astype(np.float64)
    shuffled = np.random.default_rng(seed).permutation(values)
    forwards, backwards, shuffled_sum = values.sum(axis=0), values[::-1].cumsum(axis=0)[-1], shuffled.cumsum(axis=0)[-1]
    assert forwards.tobytes() == backwards.tobytes() == shuffled_sum.tobytes()


def test_the_grid_is_finer_than_the_vectors() -> None:
    queries, documents = unit_rows(2, 1000, 16)
    frame = Frame.around(None, 2.0, 1000)
    points = MidPoints(ArrayPairs(queries=queries, documents=documents), frame).take(slice(None))
    np.testing.assert_allclose(points, midpoints(queries=queries, documents=documents), atol=1e-12, rtol=0)


def test_open_clusters_keep_their_numbers_however_many_there_are() -> None:
    points, near = framed(ConcatenatedPairs, 2), np.array([7, 90_000])
    centroids = np.zeros((90_001, 14), np.float32)
    centroids[near] = points.take(slice(None))
    for task in (PartTask(near), PartTask()):
        clusters, touched, _ = assign_part(points, centroids, task)
        assert clusters.tolist() == touched.tolist() == near.tolist()


def test_the_costliest_points_come_first_by_costs_in_float64() -> None:
    points, clusters = framed(ConcatenatedPairs, 40), np.zeros(40, np.int32)
    centroids = points.take(slice(0, 1))
    found = costliest_of_part(points, centroids, {0: 5}, clusters)
    costs = points.costs(points.take(slice(None)), centroids[clusters])
    assert [cost for _, cost, *_ in found] == sorted(costs.tolist(), reverse=True)[:5]


@pytest.mark.parametrize("kind", [MidPoints, ConcatenatedPairs])
def test_parts_make_no_difference(kind: type[Points], monkeypatch: pytest.MonkeyPatch) -> None:
    points = framed(kind, 500)
    seeds = points.take(slice(0, 12))
    whole = lloyd(LocalParts([points]), seeds, 8, -1.0)
    monkeypatch.setattr(parts_module, "PART_POINTS", 37)
    pieces = LocalParts(cut(points))
    assert len(pieces.points) == 14
    found = lloyd(pieces, seeds, 8, -1.0)
    assert found.centroids.tobytes() == whole.centroids.tobytes()
    assert np.concatenate(found.clusters).tolist() == whole.clusters[0].tolist()
    assert found.objective == pytest.approx(whole.objective, rel=1e-13)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(found.objective))


@pytest.mark.parametrize("kind", [MidPoints, ConcatenatedPairs])
def test_sums_changed_by_what_moved_are_sums(kind: type[Points]) -> None:
    points = framed(kind, 400)
    parts = LocalParts([points.subset(slice(0, 150)), points.subset(slice(150, 400))])
    first, second = points.take(slice(0, 9)), points.take(slice(20, 29))
    expected = assign(parts, second)
    found = assign(parts, second, before=assign(parts, first))
    assert found.sums.tobytes() == expected.sums.tobytes()
    assert found.counts.tolist() == expected.counts.tolist()
    near = [np.array([1, 3, 4]), np.array([0, 2, 8])]
    expected = assign(parts, second, near)
    found = assign(parts, second, near, before=assign(parts, first))
    assert found.sums.tobytes() == expected.sums.tobytes()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 999))
def test_cluster_sums_one_point_at_a_time(count: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    points = (random.integers(-5, 6, (count, 3)) * 10.0 ** random.integers(-20, 20, (count, 1))).astype(np.float32)
    clusters = random.integers(0, k, count)
    expected = np.zeros((k, 3))
    for point, cluster in zip(points, clusters, strict=True):
        expected[cluster] += point
    assert cluster_sums(points, clusters, k).tolist() == expected.tolist()


def test_both_ways_read_like_copies_and_only_clusters_of_both_stay_empty() -> None:
    queries, documents = unit_rows(2, 10, 3)
    points = ConcatenatedPairs(both_orientations(ArrayPairs(queries=queries, documents=documents)))
    whole = points.take(np.arange(20))
    np.testing.assert_allclose(whole[:10, :3], queries / np.sqrt(2), atol=1e-6)
    np.testing.assert_array_equal(whole[10:], np.roll(whole[:10], 3, axis=1))
    for part in (slice(0, 10), slice(2, 5), slice(10, 20), slice(12, 13), slice(8, 15)):
        np.testing.assert_array_equal(points.take(part), whole[part])
        np.testing.assert_array_equal(points.subset(part).take(slice(None)), whole[part])
    chosen = np.array([3, 13, 19, 0])
    np.testing.assert_array_equal(points.subset(chosen).take(np.array([1, 3])), whole[[13, 0]])
    queries, documents = unit_rows(2, 400, 8)
    documents[:, 0] += 2
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    settings = KMeansSettings(pairs="concat")
    assert cluster_pairs(ArrayPairs(queries=queries, documents=documents), 20, settings, seed=0).left_out > 5


def test_concatenations_are_never_held() -> None:
    queries, documents = unit_rows(2, 60_000, 32)
    copies = 2 * 60_000 * 2 * 32 * 4
    settings = KMeansSettings(pairs="concat", iterations=2)
    tracemalloc.start()
    cluster_pairs(ArrayPairs(queries=queries, documents=documents), 20, settings, seed=0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < copies / 2


def test_threads_of_parts_leave_torchs_number_alone() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    parts = LocalParts([framed(MidPoints, 10) for _ in range(3)])
    assert [count for _, count in parts.map(lambda _: torch.get_num_threads())] == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        list(parts.map(lambda points: 1 / (len(points) - 10)))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_few_distinct_points_are_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    costliest = refilling._costliest

    def counted(*arguments: Any) -> Any:
        looks.append(None)
        return costliest(*arguments)

    monkeypatch.setattr(refilling, "_costliest", counted)
    random = np.random.default_rng(0)
    distinct = random.standard_normal((399, 8)).astype(np.float32)
    queries = distinct[random.integers(399, size=6400)]
    found = cluster_pairs(ArrayPairs(queries=queries, documents=queries), 400, KMeansSettings(sides="queries"), seed=0)
    assert len(found.centroids) == 399
    assert len(looks) < 100  # of the order of log K an iteration, not of K
