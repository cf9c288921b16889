"""k-means over pairs: against a literal loop, what must hold of every clustering, many clusters by way of cells."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from benchmarks.kmeans import pair_similarity
from pipelines.clustering import kmeans as two_levels
from pipelines.clustering import points as parts_module
from pipelines.clustering.kmeans import Clustering, KMeansSettings, apportion, cluster_pairs, number_of_clusters
from pipelines.clustering.lloyd import Solution, assign, lloyd, objective, refill_empty, seed_centroids
from pipelines.clustering.nearest_centroids import nearest_centroids
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.clustering.points import LocalParts, MidPoints, concatenated, midpoints
from raytriever.errors import UserError

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


def mid_points(*, queries: NDArray[np.float32], documents: NDArray[np.float32]) -> LocalParts:
    """Their mid-points, as one part."""
    return LocalParts([MidPoints(ArrayPairs(queries=queries, documents=documents))])


def topics(pairs: int, dimension: int, number: int, offset: float = 0.0, seed: int = 0) -> Pair:
    """Unit vectors around random topics; queries lie ``offset`` away from documents, all in one direction."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((number, dimension))[random.integers(0, number, pairs)]
    sides = [centres + 0.3 * random.standard_normal((pairs, dimension)) for _ in range(2)]
    sides[0] += offset * random.standard_normal(dimension)
    queries, documents = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return queries.astype(np.float32), documents.astype(np.float32)


def clustered(vectors: Pair, k: int, seed: int = 0, **settings: Any) -> Clustering:
    queries, documents = vectors
    chosen = KMeansSettings(**settings)
    documents = queries if chosen.sides == "queries" else documents
    return cluster_pairs(ArrayPairs(queries=queries, documents=documents), k, chosen, seed)


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
    queries, documents = topics(120, 6, 5)
    seeds = midpoints(queries=queries, documents=documents)[[3, 40, 77, 90, 110]]
    expected, clusters = literal_lloyd(midpoints(queries=queries, documents=documents), seeds, 4)
    found = lloyd(mid_points(queries=queries, documents=documents), seeds, 4, tolerance=-1.0)
    np.testing.assert_allclose(found.centroids, expected, atol=1e-6)
    assert found.clusters[0].tolist() == clusters
    assert (len(found.objective), found.refilled) == (5, 0)
    assert len(lloyd(mid_points(queries=queries, documents=documents), seeds, 9, tolerance=1.0).objective) == 2


@settings(max_examples=25)
@given(
    st.sampled_from(["midpoint", "concat"]),
    st.integers(1, 60),
    st.integers(1, 70),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 1000),
)
def test_every_clustering(pairs: Any, n: int, k: int, number: int, offset: float, seed: int) -> None:
    queries, documents = topics(n, 5, number, offset, seed)
    found = clustered((queries, documents), k, seed, pairs=pairs)
    used = np.unique(found.assignments)
    assert used.tolist() == list(range(len(found.centroids)))  # no cluster is empty
    assert len(found.centroids) + found.left_out == min(k, n)
    assert found.centroids.shape[1] == (5 if pairs == "midpoint" else 10)
    assert (found.assignments.dtype, found.centroids.dtype) == (np.int32, np.float32)
    assert np.all(np.diff(found.objective) <= 1e-5)
    if pairs == "concat":
        np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, rtol=1e-6)
    else:
        assert found.left_out == 0
        spread = np.square(midpoints(queries=queries, documents=documents) - found.centroids[found.assignments]).sum()
        assert spread <= found.objective[-1] + 1e-4


def test_pairs_are_in_the_cluster_with_the_nearest_centroid_which_is_harder_than_chance() -> None:
    queries, documents = topics(3000, 12, 40, offset=0.5)
    found = clustered((queries, documents), 47, 1)
    points = midpoints(queries=queries, documents=documents).astype(np.float64)
    nearest = np.square(points[:, None] - found.centroids).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(found.assignments, nearest)
    shuffled = np.random.default_rng(0).permutation(found.assignments)
    ours, random = (
        pair_similarity(queries=queries, documents=documents, groups=groups).sum()
        for groups in (found.assignments, shuffled)
    )
    assert ours > 5 * random


def test_the_result_depends_on_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = (side.astype(np.float16) for side in topics(20_000, 16, 30))
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    threads = torch.get_num_threads()
    first = clustered((queries, documents), 60, 3, iterations=5)
    torch.set_num_threads(1)
    monkeypatch.setattr(parts_module, "HELD_BYTES", 0)
    monkeypatch.setattr(parts_module, "PART_POINTS", 3000)
    again = clustered((queries, mapped), 60, 3, iterations=5)
    torch.set_num_threads(threads)
    other = clustered((queries, documents), 60, 4, iterations=5)
    assert first.centroids.tobytes() == again.centroids.tobytes()
    assert first.assignments.tobytes() == again.assignments.tobytes()
    assert first.objective == again.objective
    assert first.assignments.tobytes() != other.assignments.tobytes()


@pytest.mark.parametrize(("two_level_above", "hashed"), [(100, "937e3dbdd009f5aa"), (4, "5179898df77afaa0")])
def test_the_clusters_of_a_seed_are_these_very_ones(two_level_above: int, hashed: str) -> None:
    """Others raise the algorithm_version of the job that clusters."""
    sides = np.random.default_rng(0).integers(-9, 10, (2, 6000, 4)).astype(np.float32)
    found = clustered((sides[0], sides[1]), 60, 3, two_level_above=two_level_above, iterations=3)
    assert hashlib.blake2b(found.assignments.tobytes(), digest_size=8).hexdigest() == hashed


@pytest.mark.parametrize("two_level_above", [100, 4])
def test_every_seed_draws_a_sample_and_first_centroids_of_its_own(monkeypatch, two_level_above: int) -> None:
    """Of two levels the cells' first centroids, and those within each cell."""
    draws = list[list[tuple[bytes, int]]]()

    def noted(sample: NDArray[np.float32], number: int, random: np.random.Generator) -> NDArray[np.float32]:
        stream = random.bit_generator.state["state"]["inc"]  # of the generator's seed, however much was drawn
        draws[-1].append((sample.tobytes(), stream))
        return sample[:number]

    monkeypatch.setattr(two_levels, "seed_centroids", noted)
    for seed in (3, 3, 4):
        draws.append([])
        clustered(topics(2000, 4, 3), 9, seed, iterations=1, two_level_above=two_level_above)
    assert (len(draws[0]) > 1) == (two_level_above == 4)
    one, again, other = map(sorted, draws)  # threads draw for cells in any order
    assert one == again
    for own, others in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True):
        assert not set(own) & set(others)


@pytest.mark.parametrize("two_level_above", [100, 4])
def test_iterations_and_tolerance_bound_every_search(monkeypatch, two_level_above: int) -> None:
    bounds = list[tuple[int, float]]()

    def noted(*given: Any) -> Solution:
        bounds.append(given[2:4])
        return lloyd(*given)

    monkeypatch.setattr(two_levels, "lloyd", noted)
    clustered(topics(200, 4, 3), 9, iterations=1, tolerance=0.5, two_level_above=two_level_above)
    assert set(bounds) == {(1, 0.5)}


@pytest.mark.parametrize("pairs", ["midpoint", "concat"])
def test_as_many_clusters_as_distinct_points(pairs: Any) -> None:
    ones = np.ones((100, 4), dtype=np.float16)
    found = clustered((ones, ones), 5, pairs=pairs)
    assert (len(found.centroids), found.left_out) == (1, 4)
    assert not found.assignments.any()
    distinct = np.eye(3, dtype=np.float32)[np.random.default_rng(0).integers(0, 3, 200)]
    found = clustered((distinct, distinct), 10)
    assert (len(found.centroids), found.left_out, found.objective[-1]) == (3, 7, 0.0)


def test_an_empty_cluster_takes_the_costliest_point_of_the_largest_as_its_centroid() -> None:
    line = np.array([[0.0], [1.0], [2.0], [9.0], [50.0], [51.0]], dtype=np.float32)
    seeds = np.array([[1.0], [50.0], [1000.0]], dtype=np.float32)
    halves = LocalParts([MidPoints(ArrayPairs(queries=half, documents=half)) for half in (line[:1], line[1:])])
    ((cluster, moved),) = refill_empty(halves, assign(halves, seeds), seeds).items()
    assert (cluster, moved.donor, moved.cost, moved.point.tolist()) == (2, 0, 64.0, [9.0])
    found = lloyd(mid_points(queries=line, documents=line), seeds, 0, 0.0)
    assert found.clusters[0].tolist() == [0, 0, 0, 2, 1, 1]
    assert found.centroids.ravel().tolist() == [1.0, 50.0, 9.0]
    assert seeds.ravel().tolist() == [1.0, 50.0, 1000.0]
    assert (found.refilled, found.objective) == (1, (3.0,))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 999))
def test_refilling_as_one_would_by_hand(n: int, k: int, distinct: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    line = random.integers(0, 3 * distinct, (n, 1)).astype(np.float32)
    centroids = random.integers(0, 12, (k, 1)).astype(np.float32)
    points = MidPoints(ArrayPairs(queries=line, documents=line))
    parts = LocalParts([points.subset(slice(0, n // 2)), points.subset(slice(n // 2, n))] if n > 1 else [points])
    assignment = assign(parts, centroids)
    expected = np.concatenate(assignment.clusters)
    costs = np.square(line[:, 0] - centroids[expected, 0])
    for empty in np.flatnonzero(np.bincount(expected, minlength=k) == 0):
        for donor in np.argsort(-np.bincount(expected, minlength=k), kind="stable"):
            members = np.flatnonzero(expected == donor)
            if len(members) > 1 and costs[members].max() > 0:
                point = members[costs[members].argmax()]
                expected[point], costs[point] = empty, 0
                break
        else:
            break
    refill_empty(parts, assignment, centroids)
    assert np.concatenate(assignment.clusters).tolist() == expected.tolist()
    assert assignment.counts.tolist() == np.bincount(expected, minlength=k).tolist()
    sums = [float(line[expected == cluster].sum()) for cluster in range(k)]
    assert assignment.sums.ravel().tolist() == sums


def test_points_choose_among_the_clusters_nearby() -> None:
    line = np.array([[0.0], [4.0], [6.0], [10.0]], dtype=np.float32)
    centroids = np.array([[0.0], [5.0], [10.0]], dtype=np.float32)
    points = MidPoints(ArrayPairs(queries=line, documents=line))
    parts = LocalParts([points.subset(np.array(places)) for places in ([0, 2], [1, 3])])
    found = assign(parts, centroids, [np.array([0]), np.array([1, 2])])
    assert [clusters.tolist() for clusters in found.clusters] == [[0, 0], [1, 2]]
    assert found.sums.ravel().tolist() == [6, 4, 10]
    assert found.counts.tolist() == [2, 1, 1]
    squares = sum(points.squares() for points in parts.points)
    assert objective(found, centroids, squares, spherical=False) == 37


def test_seeds_are_different_points_far_apart() -> None:
    queries, documents = topics(4000, 8, 6, seed=3)
    parts, sample = mid_points(queries=queries, documents=documents), midpoints(queries=queries, documents=documents)

    def cost(seeds: NDArray[np.float32]) -> float:
        return objective(assign(parts, seeds), seeds, parts.points[0].squares(), spherical=False)

    seeds = seed_centroids(sample, 6, np.random.default_rng(0))
    random = sample[np.sort(np.random.default_rng(0).choice(4000, 6, replace=False))]
    assert cost(seeds) < cost(random)
    rows = seed_centroids(sample, 500, np.random.default_rng(0))
    assert len(np.unique(rows, axis=0)) == 500


def test_restarts_keep_the_best() -> None:
    sides = topics(300, 6, 20, seed=5)
    one, many = ([clustered(sides, 20, seed, restarts=n).objective[-1] for seed in range(4)] for n in (1, 8))
    assert all(best <= single for single, best in zip(one, many, strict=True))
    assert len(set(one)) > 1
    assert many[-1] < one[-1]


@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_vector_is_named(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_POINTS", 16)
    sides = topics(50, 4, 3)
    sides[side][37, 2] = np.nan if side else np.inf
    with pytest.raises(UserError, match=f"{('query', 'document')[side]} vector of pair 37 "):
        clustered(sides, 4)


def test_queries_alone() -> None:
    queries, documents = topics(400, 6, 12, offset=0.4)
    found, again = clustered((queries, documents), 15, 2, sides="queries"), clustered((queries, queries), 15, 2)
    assert found.assignments.tobytes() == again.assignments.tobytes()
    assert found.centroids.tobytes() == again.centroids.tobytes()
    queries[3, 0] = np.nan
    with pytest.raises(UserError, match="query vector of pair 3 "):
        clustered((queries, documents), 15, 2, sides="queries")


def test_zero_vectors_are_counted_and_vectors_may_have_any_length() -> None:
    queries, documents = topics(50, 4, 3)
    documents[[3, 9]] = 0
    queries[[9, 10, 11]] = 0
    for pairs in ("midpoint", "concat"):
        found = clustered((queries, documents), 5, pairs=pairs)
        assert (found.zeros, len(found.assignments)) == (4, 50)
        assert np.isfinite(found.centroids).all()
    shortest = np.full((1, 4), 1e-40, np.float32)
    np.testing.assert_allclose(concatenated(shortest, shortest), np.sqrt(1 / 8), rtol=1e-4)
    queries, documents = topics(300, 6, 10)
    small, large = (clustered((f * queries, f * documents), 12) for f in (2.0**-20, 2.0**30))
    assert small.assignments.tobytes() == large.assignments.tobytes()
    assert (small.centroids * np.float32(2.0**50)).tobytes() == large.centroids.tobytes()
    documents[5, 1] = 1e20
    with pytest.raises(UserError, match=r"pair 5 .* beyond 1e\+15"):
        clustered((queries, documents), 12)


def test_inputs_that_do_not_fit_are_refused() -> None:
    queries, documents = topics(10, 4, 2)
    with pytest.raises(UserError, match="0 clusters"):
        clustered((queries, documents), 0)
    for sides in ((queries[:9], documents), (queries[0], documents[0]), (queries, documents.astype(np.float64))):
        with pytest.raises(UserError, match=r"Queries are float32 of shape .* Give float16 or float32, a row for each"):
            clustered(sides, 2)
    with pytest.raises(ValidationError, match="sides: queries"):
        KMeansSettings.model_validate({"sides": "queries", "pairs": "concat"})
    with pytest.raises(ValidationError, match="midpont"):
        KMeansSettings.model_validate({"pairs": "midpont"})
    with pytest.raises(UserError, match="clusters of 0"):
        number_of_clusters(10, 0)


@pytest.mark.parametrize(("n", "size", "k"), [(1, 64, 1), (64, 64, 1), (65, 64, 2), (10**9, 3, 333333334)])
def test_number_of_clusters(n: int, size: int, k: int) -> None:
    assert number_of_clusters(n, size) == k


def test_two_levels_come_near_flat_clusters_and_with_all_cells_near_find_the_nearest(monkeypatch) -> None:
    queries, documents = topics(6000, 12, 60)
    flat, found = clustered((queries, documents), 90), clustered((queries, documents), 90, two_level_above=10)
    assert len(found.centroids) == 90
    assert np.unique(found.assignments).tolist() == list(range(90))
    assert found.objective[-1] < 1.05 * flat.objective[-1]
    spread = np.square(midpoints(queries=queries, documents=documents) - found.centroids[found.assignments]).sum()
    assert spread == pytest.approx(found.objective[-1], rel=1e-4)
    monkeypatch.setattr(two_levels, "NEAR_CELLS", 100)
    queries, documents = topics(2000, 6, 30)
    found = clustered((queries, documents), 50, two_level_above=10)
    points = midpoints(queries=queries, documents=documents).astype(np.float64)
    nearest = np.square(points[:, None] - found.centroids).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == found.assignments) > 0.999  # but for what float32 makes of nearly equal distances


def test_clusters_of_two_levels_may_be_many() -> None:
    queries, documents = topics(60, 4, 3)
    points = MidPoints(ArrayPairs(queries=queries, documents=documents))
    found = two_levels.lloyd_in_two_levels(points, LocalParts, points, 9, KMeansSettings(), (0,))
    assert [clusters.dtype for clusters in found.clusters] == [np.int32]


@pytest.mark.parametrize("pairs", ["midpoint", "concat"])
def test_parts_make_no_difference_to_two_levels(pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, settings = topics(1500, 8, 30, offset=0.3), {"pairs": pairs, "two_level_above": 10, "iterations": 6}
    whole = clustered(sides, 40, 5, **settings)
    monkeypatch.setattr(parts_module, "PART_POINTS", 100)
    monkeypatch.setattr(parts_module, "HELD_BYTES", 0)
    found = clustered(sides, 40, 5, **settings)
    assert found.assignments.tobytes() == whole.assignments.tobytes()
    assert found.centroids.tobytes() == whole.centroids.tobytes()


@pytest.mark.parametrize("distinct", [1, 5, 400])
def test_fewer_distinct_pairs_than_clusters(distinct: int) -> None:
    queries, documents = topics(distinct, 4, 3)
    rows = np.arange(1200) % distinct
    found = clustered((queries[rows], documents[rows]), 600, two_level_above=10)
    assert len(found.centroids) <= distinct
    assert found.left_out == 600 - len(found.centroids)
    assert len(np.unique(rows + 1000 * found.assignments)) == distinct  # equal pairs are together


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_apportion(sizes: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(len(sizes), sum(sizes)))
    shares = apportion(k, np.array(sizes))
    assert shares.sum() == k
    assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_large_cells_are_divided() -> None:
    random = np.random.default_rng(0)
    vectors = random.standard_normal((3000, 8)).astype(np.float32)
    vectors[:2000] += 9 * np.ones(8, np.float32)  # two thirds in one place
    sample = MidPoints(ArrayPairs(queries=vectors, documents=vectors))
    coarse = lloyd(LocalParts([sample]), vectors[[0, 2100, 2200, 2300]], 5, 0.0)
    assert np.bincount(coarse.clusters[0]).max() == 2000
    centroids = two_levels.split_large_cells(coarse, sample)
    cells = nearest_centroids(vectors, centroids)[0]
    sizes = np.bincount(cells, minlength=len(centroids))
    assert sizes.max() < 1.5 * two_levels.LARGEST_CELL * 3000 / 4
    assert len(centroids) == 4 + 2  # one cell becomes three
    assert two_levels.split_large_cells(Solution(vectors[:4], [np.arange(3000) % 4], (), 0), sample).shape == (4, 8)
