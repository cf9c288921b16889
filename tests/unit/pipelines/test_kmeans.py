"""k-means over pairs: against a literal loop, and what must hold of every clustering."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from raytriever.pipelines import kmeans
from raytriever.pipelines import lloyd as steps
from raytriever.pipelines.hardness import pair_similarity
from raytriever.pipelines.kmeans import KMeansSettings, cluster_pairs, number_of_clusters
from raytriever.pipelines.lloyd import (
    ConcatenatedPairs,
    MidPoints,
    assign,
    lloyd,
    midpoints,
    refill_empty,
    seed_centroids,
)
from raytriever.pipelines.two_levels import apportion, assign_nearby
from raytriever.retrieval.errors import UserError

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


def topics(pairs: int, dimension: int, number: int, offset: float = 0.0, seed: int = 0) -> Pair:
    """Unit vectors around random topics; queries lie ``offset`` away from documents, all in one direction."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((number, dimension))[random.integers(0, number, pairs)]
    sides = [centres + 0.3 * random.standard_normal((pairs, dimension)) for _ in range(2)]
    sides[1] += offset * random.standard_normal(dimension)
    documents, queries = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return documents.astype(np.float32), queries.astype(np.float32)


def literal_lloyd(points: NDArray[Any], centroids: NDArray[Any], iterations: int) -> tuple[NDArray[Any], list[int]]:
    """Lloyd's algorithm, one point and one cluster at a time."""
    centroids = centroids.astype(np.float32)
    for step in range(iterations + 1):
        clusters = [
            min(range(len(centroids)), key=lambda k: float(np.square(x.astype(float) - centroids[k]).sum()))
            for x in points
        ]
        if step == iterations:
            break
        for k in range(len(centroids)):
            members = [points[i].astype(float) for i in range(len(points)) if clusters[i] == k]
            centroids[k] = sum(members) / len(members)
    return centroids, clusters


def test_lloyd_equals_the_literal_loop() -> None:
    documents, queries = topics(120, 6, 5)
    seeds = midpoints(documents, queries)[[3, 40, 77, 90, 110]]
    expected, clusters = literal_lloyd(midpoints(documents, queries), seeds, 4)
    found = lloyd(MidPoints(documents, queries), seeds, 4, tolerance=-1.0)
    np.testing.assert_allclose(found.centroids, expected, atol=1e-6)
    assert found.assignment.clusters.tolist() == clusters
    assert (len(found.objective), found.refilled) == (5, 0)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["midpoint", "concat"]),
    st.integers(1, 60),
    st.integers(1, 70),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 1000),
)
def test_every_clustering(pairs: Any, n: int, k: int, number: int, offset: float, seed: int) -> None:
    documents, queries = topics(n, 5, number, offset, seed)
    found = cluster_pairs(documents, queries, k, KMeansSettings(pairs=pairs), seed)
    used = np.unique(found.assignments)
    assert used.tolist() == list(range(len(found.centroids)))  # no cluster is empty
    assert len(found.centroids) + found.left_out == min(k, n)
    assert found.centroids.shape[1] == (5 if pairs == "midpoint" else 10)
    assert (found.assignments.dtype, found.centroids.dtype) == (np.int32, np.float32)
    assert np.all(np.diff(found.objective) <= 1e-5)
    assert found.iterations == len(found.objective) - 1
    if pairs == "midpoint":
        assert found.left_out == 0
        spread = np.square(midpoints(documents, queries) - found.centroids[found.assignments]).sum()
        assert spread <= found.objective[-1] + 1e-4


def test_pairs_are_in_the_cluster_with_the_nearest_centroid() -> None:
    documents, queries = topics(3000, 12, 40, offset=0.5)
    found = cluster_pairs(documents, queries, 47, KMeansSettings(), 1)
    points = midpoints(documents, queries).astype(np.float64)
    nearest = np.square(points[:, None] - found.centroids).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(found.assignments, nearest)


def test_the_result_depends_on_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, queries = (side.astype(np.float16) for side in topics(20_000, 16, 30))
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    threads = torch.get_num_threads()
    first = cluster_pairs(documents, queries, 60, KMeansSettings(iterations=5), 3)
    torch.set_num_threads(1)
    monkeypatch.setattr(kmeans, "HELD_BYTES", 0)
    again = cluster_pairs(mapped, queries, 60, KMeansSettings(iterations=5), 3)
    torch.set_num_threads(threads)
    other = cluster_pairs(documents, queries, 60, KMeansSettings(iterations=5), 4)
    assert first.centroids.tobytes() == again.centroids.tobytes()
    assert first.assignments.tobytes() == again.assignments.tobytes()
    assert first.objective == again.objective
    assert first.assignments.tobytes() != other.assignments.tobytes()


@pytest.mark.parametrize("pairs", ["midpoint", "concat"])
def test_identical_vectors_are_one_cluster(pairs: Any) -> None:
    ones = np.ones((100, 4), dtype=np.float16)
    found = cluster_pairs(ones, ones, 5, KMeansSettings(pairs=pairs), 0)
    assert (len(found.centroids), found.left_out) == (1, 4)
    assert not found.assignments.any()


def test_as_many_clusters_as_distinct_points() -> None:
    distinct = np.eye(3, dtype=np.float32)[np.random.default_rng(0).integers(0, 3, 200)]
    found = cluster_pairs(distinct, distinct, 10, KMeansSettings(), 0)
    assert (len(found.centroids), found.left_out, found.objective[-1]) == (3, 7, 0.0)


def test_fewer_pairs_than_clusters() -> None:
    documents, queries = topics(7, 4, 3)
    found = cluster_pairs(documents, queries, 50, KMeansSettings(), 0)
    assert sorted(found.assignments.tolist()) == list(range(7))


def test_an_empty_cluster_takes_the_costliest_point_of_the_largest() -> None:
    line = np.array([[0.0], [1.0], [2.0], [9.0], [50.0], [51.0]], dtype=np.float32)
    points = MidPoints(line, line)
    assignment = assign(points, np.array([[1.0], [50.0], [1000.0]], dtype=np.float32))
    before = assignment.objective
    moves = refill_empty(points, assignment)
    assert moves.tolist() == [[2, 3]]
    assert assignment.clusters.tolist() == [0, 0, 0, 2, 1, 1]
    assert assignment.counts.tolist() == [3, 2, 1]
    assert assignment.sums.ravel().tolist() == [3.0, 101.0, 9.0]
    assert assignment.objective == before - 64


def test_a_cluster_refilled_last_has_its_point_as_centroid() -> None:
    line = np.array([[0.0], [1.0], [2.0], [9.0], [50.0], [51.0]], dtype=np.float32)
    seeds = np.array([[1.0], [50.0], [1000.0]], dtype=np.float32)
    found = lloyd(MidPoints(line, line), seeds, 0, 0.0)
    assert found.centroids.ravel().tolist() == [1.0, 50.0, 9.0]
    assert seeds.ravel().tolist() == [1.0, 50.0, 1000.0]
    assert (found.refilled, found.objective) == (1, (3.0,))


def test_points_choose_among_the_clusters_nearby() -> None:
    line = np.array([[0.0], [4.0], [6.0], [10.0]], dtype=np.float32)
    centroids = np.array([[0.0], [5.0], [10.0]], dtype=np.float32)
    members, candidates = [np.array([0, 2]), np.array([1, 3])], [np.array([0]), np.array([1, 2])]
    found = assign_nearby(MidPoints(line, line), centroids, members, candidates)
    assert found.clusters.tolist() == [0, 1, 0, 2]
    assert found.costs.tolist() == [0, 1, 36, 0]
    assert found.sums.ravel().tolist() == [6, 4, 10]
    assert found.counts.tolist() == [2, 1, 1]


def test_concatenated_pairs_swap_their_halves() -> None:
    documents, queries = topics(10, 3, 2)
    points = ConcatenatedPairs(documents, queries)
    whole = points.take(np.arange(20))
    np.testing.assert_allclose(whole[:10, :3], queries / np.sqrt(2), atol=1e-6)
    np.testing.assert_array_equal(whole[10:], np.roll(whole[:10], 3, axis=1))
    for part in (slice(0, 10), slice(2, 5), slice(10, 20), slice(12, 13), slice(8, 15)):
        np.testing.assert_array_equal(points.take(part), whole[part])


def test_seeds_are_different_points_far_apart() -> None:
    documents, queries = topics(4000, 8, 6, seed=3)
    points = MidPoints(documents, queries)
    seeds = seed_centroids(points, 6, np.random.default_rng(0))
    drawn = assign(points, seeds).objective
    random = points.take(np.sort(np.random.default_rng(0).choice(4000, 6, replace=False)))
    assert drawn < assign(points, random).objective
    rows = seed_centroids(points, 500, np.random.default_rng(0))
    assert len(np.unique(rows, axis=0)) == 500


def test_restarts_keep_the_best() -> None:
    documents, queries = topics(300, 6, 20, seed=5)
    for seed in range(4):
        one, many = (cluster_pairs(documents, queries, 20, KMeansSettings(restarts=n), seed) for n in (1, 8))
        assert many.objective[-1] <= one.objective[-1]
    assert len({cluster_pairs(documents, queries, 20, KMeansSettings(), seed).objective[-1] for seed in range(4)}) > 1
    assert many.objective[-1] < one.objective[-1]


def test_two_levels_come_near_flat_clusters() -> None:
    documents, queries = topics(6000, 12, 60)
    flat = cluster_pairs(documents, queries, 90, KMeansSettings(), 0)
    found = cluster_pairs(documents, queries, 90, KMeansSettings(two_level_above=10), 0)
    assert len(found.centroids) == 90
    assert np.unique(found.assignments).tolist() == list(range(90))
    assert found.objective[-1] < 1.05 * flat.objective[-1]
    spread = np.square(midpoints(documents, queries) - found.centroids[found.assignments]).sum()
    assert spread == pytest.approx(found.objective[-1], rel=1e-4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_apportion(sizes: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(len(sizes), sum(sizes)))
    shares = apportion(k, np.array(sizes))
    assert shares.sum() == k
    assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_clusters_are_harder_than_chance() -> None:
    documents, queries = topics(2000, 16, 40, offset=0.3)
    found = cluster_pairs(documents, queries, 40, KMeansSettings(), 0)
    shuffled = np.random.default_rng(0).permutation(found.assignments)
    ours, random = (pair_similarity(documents, queries, groups).sum() for groups in (found.assignments, shuffled))
    assert ours > 5 * random


@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_vector_is_named(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BLOCK_ROWS", 16)
    both = topics(50, 4, 3)
    both[side][37, 2] = np.nan if side else np.inf
    with pytest.raises(UserError, match=f"{('document', 'query')[side]} vector of pair 37 "):
        cluster_pairs(*both, 4, KMeansSettings(), 0)


def test_inputs_that_do_not_fit_are_refused() -> None:
    documents, queries = topics(10, 4, 2)
    with pytest.raises(UserError, match=r"\(10, 4\).*\(9, 4\)"):
        cluster_pairs(documents, queries[:9], 2, KMeansSettings(), 0)
    with pytest.raises(UserError, match="0 clusters"):
        cluster_pairs(documents, queries, 0, KMeansSettings(), 0)
    with pytest.raises(UserError, match="float64"):
        cluster_pairs(documents.astype(np.float64), queries, 2, KMeansSettings(), 0)
    with pytest.raises(ValidationError, match="midpont"):
        KMeansSettings.model_validate({"pairs": "midpont"})
    with pytest.raises(UserError, match="clusters of 0"):
        number_of_clusters(10, 0)


@pytest.mark.parametrize(("n", "size", "k"), [(1, 64, 1), (64, 64, 1), (65, 64, 2), (10**9, 3, 333333334)])
def test_number_of_clusters(n: int, size: int, k: int) -> None:
    assert number_of_clusters(n, size) == k
