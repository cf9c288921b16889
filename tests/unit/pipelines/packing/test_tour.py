"""The tour is the literal greedy walk, step by step; lists of neighbours keep their bounds."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import squared_distances
from pipelines.packing import neighbours as module
from pipelines.packing.neighbours import Neighbours, find_neighbours
from pipelines.packing.tour import _Survivors, greedy_tour

RANDOM = np.random.default_rng(11)


def literal_tour(centroids: NDArray[np.floating], start: int) -> list[int]:
    """From each cluster to the nearest unvisited one, the lowest index on ties; every distance at every step."""
    points = centroids.astype(np.float64)
    order, left = [start], np.ones(len(points), dtype=bool)
    left[start] = False
    while left.any():
        distances = np.square(points - points[order[-1]]).sum(axis=1)
        distances[~left] = np.inf
        order.append(int(distances.argmin()))
        left[order[-1]] = False
    return order


def blobs(number: int, size: int, spread: float) -> NDArray[np.float32]:
    centres = 50 * RANDOM.standard_normal((number, 16))
    points = np.repeat(centres, size, axis=0) + spread * RANDOM.standard_normal((number * size, 16))
    return points[RANDOM.permutation(len(points))].astype(np.float32)


CASES = {
    "random": RANDOM.standard_normal((1500, 24)).astype(np.float32),
    "a lattice of ties": RANDOM.integers(0, 4, (600, 3)).astype(np.float32),
    "identical": np.ones((1200, 8), np.float32),
    "blobs": blobs(3, 300, 0.01),
    "an outlier": np.concatenate((RANDOM.standard_normal((600, 16)), np.full((1, 16), 1e4))).astype(np.float32),
    "far from the origin": (100 + 0.01 * RANDOM.standard_normal((600, 16))).astype(np.float32),
    "enormous": (1e25 * RANDOM.standard_normal((300, 5))).astype(np.float32),
    "one dense spot": (RANDOM.standard_normal((900, 12)) * np.logspace(-4, 1, 900)[:, None]).astype(np.float32),
    "tiny": (1e-12 * RANDOM.standard_normal((300, 5))).astype(np.float32),
    "half precision": RANDOM.standard_normal((300, 5)).astype(np.float16),
    "near one another beside outliers": np.concatenate(
        (RANDOM.standard_normal((300, 5)), [[3e3] * 5, [-3e3] * 5])
    ).astype(np.float32),
    "one": np.ones((1, 3), np.float32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_literal_walk(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda: dtype)
    centroids = CASES[name]
    neighbours = find_neighbours(centroids)
    for start in {0, len(centroids) // 2, len(centroids) - 1}:
        with np.errstate(over="raise"):
            assert greedy_tour(neighbours, start).tolist() == literal_tour(centroids, start)


@pytest.mark.parametrize(("name", "scale"), [("random", 1e-18), ("far from the origin", 1), ("one dense spot", 1)])
def test_of_the_survivors_few_are_looked_at_in_float64_the_nearest_among_them(name: str, scale: float) -> None:
    centroids = CASES[name] * np.float32(scale)
    survivors, unvisited = _Survivors(centroids), np.ones(len(centroids), dtype=bool)
    for cluster in range(0, len(centroids), 10):
        unvisited[cluster] = False
        distances = np.where(unvisited, squared_distances(centroids, centroids[cluster]), np.inf)
        near = survivors.near(cluster, unvisited)
        assert near.dtype == np.int32
        assert distances.argmin() in near
        assert len(near) < 100


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_small_lattices(size: int, seed: int, data: st.DataObject) -> None:
    centroids = np.random.default_rng(seed).integers(-2, 3, (size, 2)).astype(np.float32)
    start = data.draw(st.integers(0, size - 1))
    assert greedy_tour(find_neighbours(centroids), start).tolist() == literal_tour(centroids, start)


def test_what_is_not_listed_or_listed_as_farther_may_be_the_nearest() -> None:
    """Nearness from 0 is -0.405, -0.42 and -0.5; computed, it is off by at most 0.1."""
    centroids = np.array([[0], [-0.9], [np.sqrt(0.84)], [1]], dtype=np.float32)
    for listed, nearness, threshold in (([3], [-0.4], -0.405), ([3, 2, 1], [-0.41, -0.45, -0.5], -0.6)):
        lists = (np.array([each] * 4) for each in (listed, nearness))
        bounds = (np.full(4, each, np.float32) for each in (threshold, 0.1))
        assert greedy_tour(Neighbours(centroids, *lists, *bounds), 0)[1] == 1


def test_short_lists_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    centroids = RANDOM.standard_normal((400, 8)).astype(np.float32)
    expected = literal_tour(centroids, 7)
    for length in (1, 3, 400):
        monkeypatch.setattr(module, "LIST_LENGTH", length)
        assert greedy_tour(find_neighbours(centroids), 7).tolist() == expected


def true_nearness(centroids: NDArray[np.floating]) -> NDArray[np.float64]:
    """-|x - y|²/2 in the unit of the lists: the power of two above the longest centred point."""
    points = centroids.astype(np.float64)
    points -= points.mean(axis=0)
    longest = np.sqrt(np.square(points).sum(axis=1).max())
    points /= 2.0 ** np.ceil(np.log2(longest)) if longest else 1.0
    squares = np.square(points[:, None] - points[None]).sum(axis=2)
    return np.asarray(-squares / 2)


def check(neighbours: Neighbours) -> None:
    assert neighbours.clusters.dtype == np.int32
    true = true_nearness(neighbours.centroids)
    size = len(true)
    listed = np.zeros((size, size), dtype=bool)
    for row in range(size):
        filled = np.isfinite(neighbours.nearness[row])
        others = neighbours.clusters[row][filled]
        assert len(set(others.tolist())) == len(others)
        assert np.all(neighbours.clusters[row][~filled] == row)
        assert np.all(np.diff(neighbours.nearness[row][filled]) <= 0)
        listed[row, others] = True
        off = np.abs(neighbours.nearness[row][filled] - true[row, others])
        assert np.all(off <= neighbours.errors[row])
    rows, columns = np.nonzero(~listed)
    assert np.all(true[rows, columns] <= neighbours.thresholds[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=30)
@given(
    size=st.integers(1, 90),
    dimension=st.integers(1, 9),
    length=st.integers(1, 20),
    spread=st.floats(-4, 0),
    top=st.sampled_from([-2, 1]),
    shift=st.sampled_from([0.0, 10.0]),
    seed=st.integers(0, 999),
)
@example(
    size=47, dimension=1, length=1, spread=-1.0, top=1, shift=0.0, seed=47
)  # a nearer one is cut off, for its rounding
def test_bounds_hold(dtype, size, dimension, length, spread, top, shift, seed) -> None:
    random = np.random.default_rng(seed)
    scales = np.logspace(spread + top, top, size)[:, None]  # from a dense spot to outliers
    centroids = (scales * random.standard_normal((size, dimension)) + shift).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "product_dtype", lambda: dtype)
        patch.setattr(module, "LIST_LENGTH", length)
        patch.setattr(module, "SAMPLED_LENGTH", 2 * length)
        patch.setattr(module, "TILE_ROWS", 16)
        patch.setattr(module, "TILE_COLUMNS", 24)
        check(find_neighbours(centroids))


@pytest.mark.parametrize("name", ["enormous", "near one another beside outliers"])
def test_bounds_hold_at_any_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda: torch.float32)
    check(find_neighbours(CASES[name]))


def test_what_is_near_is_listed_and_flags_have_places() -> None:
    centroids = np.random.default_rng(0).standard_normal((1200, 20)).astype(np.float32)
    neighbours = find_neighbours(centroids)
    assert neighbours.clusters.shape == (1200, module.LIST_LENGTH)
    assert np.median(np.isfinite(neighbours.nearness).sum(axis=1)) > 0.9 * module.LIST_LENGTH
    for slack in (neighbours.errors, neighbours.thresholds - neighbours.nearness[:, -1]):
        assert np.median(slack) < 0.05 * np.median(-true_nearness(centroids))
    for size, stride, rank in ((1200, 1, 129), (2048, 2, 65)):
        points = np.random.default_rng(1).standard_normal((size, 3))
        points[:2] = [[1e5], [-1e5]]
        rows = module._round(points).rows
        nearness = (module._left_side(rows, 0) @ rows[::stride].T).to(module.STORED).float().numpy()
        thresholds = module._sampled_thresholds(rows)[:, None]
        assert ((nearness >= thresholds).sum(axis=1) >= rank).all()
        assert ((nearness > thresholds).sum(axis=1) < rank).all()
    random = np.random.default_rng(2)
    for size in (0, 1, 7, 8, 64, 1003):
        flags = random.random(size) < 0.05
        np.testing.assert_array_equal(module._true_places(flags), np.flatnonzero(flags))


def test_a_cluster_with_no_neighbour_has_itself_whatever_its_number() -> None:
    clusters, nearness, cut_off = module._cut(np.zeros(0, np.int64), np.zeros(40_000, np.float32))
    np.testing.assert_array_equal(clusters[:, 0], np.arange(40_000))
    assert np.isneginf(nearness).all()
    assert np.isneginf(cut_off).all()


def test_rows_with_too_many_entries_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_ROWS", 64)
    monkeypatch.setattr(module, "TILE_COLUMNS", 128)
    monkeypatch.setattr(module, "MOST_FOUND", 100)
    centroids = np.random.default_rng(1).standard_normal((500, 4)).astype(np.float32)
    rows = module._round(centroids).rows
    keys, overlong = module._keys_above(rows, np.full(500, -4.0, np.float32))  # all are above
    assert overlong.all()
    assert np.bincount(keys >> 40, minlength=500).max() < 100
    monkeypatch.setattr(module, "_sampled_thresholds", lambda rows: np.full(len(rows), -4.0, np.float32))
    assert np.all(find_neighbours(centroids).thresholds == np.inf)
