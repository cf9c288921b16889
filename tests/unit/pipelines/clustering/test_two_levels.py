"""Many clusters by way of cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.clustering import kmeans as two_levels
from pipelines.clustering import points as parts_module
from pipelines.clustering.kmeans import KMeansSettings, apportion, cluster_pairs
from pipelines.clustering.lloyd import Solution, lloyd
from pipelines.clustering.nearest_centroids import nearest_centroids
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.clustering.points import LocalParts, MidPoints, midpoints
from tests.unit.pipelines.clustering.test_kmeans import topics


def test_two_levels_come_near_flat_clusters() -> None:
    queries, documents = topics(6000, 12, 60)
    flat = cluster_pairs(queries=queries, documents=documents, k=90, settings=KMeansSettings(), seed=0)
    found = cluster_pairs(
        queries=queries, documents=documents, k=90, settings=KMeansSettings(two_level_above=10), seed=0
    )
    assert len(found.centroids) == 90
    assert np.unique(found.assignments).tolist() == list(range(90))
    assert found.objective[-1] < 1.05 * flat.objective[-1]
    spread = np.square(midpoints(queries=queries, documents=documents) - found.centroids[found.assignments]).sum()
    assert spread == pytest.approx(found.objective[-1], rel=1e-4)


@pytest.mark.parametrize("pairs", ["midpoint", "concat"])
def test_parts_make_no_difference(pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = topics(1500, 8, 30, offset=0.3)
    settings = KMeansSettings.model_validate({"pairs": pairs, "two_level_above": 10, "iterations": 6})
    whole = cluster_pairs(queries=queries, documents=documents, k=40, settings=settings, seed=5)
    monkeypatch.setattr(parts_module, "PART_POINTS", 100)
    monkeypatch.setattr(parts_module, "HELD_BYTES", 0)
    found = cluster_pairs(queries=queries, documents=documents, k=40, settings=settings, seed=5)
    assert found.assignments.tobytes() == whole.assignments.tobytes()
    assert found.centroids.tobytes() == whole.centroids.tobytes()


def test_with_all_cells_near_points_are_with_their_nearest_centroid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_levels, "NEAR_CELLS", 100)
    queries, documents = topics(2000, 6, 30)
    found = cluster_pairs(
        queries=queries, documents=documents, k=50, settings=KMeansSettings(two_level_above=10), seed=0
    )
    points = midpoints(queries=queries, documents=documents).astype(np.float64)
    nearest = np.square(points[:, None] - found.centroids).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == found.assignments) > 0.999  # but for what float32 makes of nearly equal distances


@pytest.mark.parametrize("distinct", [1, 5, 400])
def test_fewer_distinct_pairs_than_clusters(distinct: int) -> None:
    queries, documents = topics(distinct, 4, 3)
    rows = np.arange(1200) % distinct
    found = cluster_pairs(
        queries=queries[rows], documents=documents[rows], k=600, settings=KMeansSettings(two_level_above=10), seed=0
    )
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
