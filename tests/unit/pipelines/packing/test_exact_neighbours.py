"""Lists of neighbours keep what they promise: bounds that hold, however coarse the products."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.packing import neighbours as module
from pipelines.packing.neighbours import Neighbours, find_neighbours


def true_nearness(centroids: NDArray[np.floating]) -> NDArray[np.float64]:
    """-|x - y|²/2 in the unit of the lists: the power of two above the longest centred point."""
    points = centroids.astype(np.float64)
    points -= points.mean(axis=0)
    longest = np.sqrt(np.square(points).sum(axis=1).max())
    points /= 2.0 ** np.ceil(np.log2(longest)) if longest else 1.0
    squares = np.square(points[:, None] - points[None]).sum(axis=2)
    return np.asarray(-squares / 2)


def check(neighbours: Neighbours) -> None:
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
    spread=st.floats(-3, 1),
    shift=st.sampled_from([0.0, 10.0]),
    seed=st.integers(0, 999),
)
@example(size=47, dimension=1, length=1, spread=0.0, shift=0.0, seed=47)  # a nearer one is cut off, for its rounding
def test_bounds_hold(
    dtype: torch.dtype, size: int, dimension: int, length: int, spread: float, shift: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    scales = np.logspace(spread, 1, size)[:, None]  # from a dense spot to outliers
    centroids = (scales * random.standard_normal((size, dimension)) + shift).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "product_dtype", lambda: dtype)
        patch.setattr(module, "LIST_LENGTH", length)
        patch.setattr(module, "SAMPLED_LENGTH", 2 * length)
        patch.setattr(module, "TILE_ROWS", 16)
        patch.setattr(module, "TILE_COLUMNS", 24)
        check(find_neighbours(centroids))


def test_what_is_near_is_listed() -> None:
    centroids = np.random.default_rng(0).standard_normal((1200, 20)).astype(np.float32)
    neighbours = find_neighbours(centroids)
    lengths = np.isfinite(neighbours.nearness).sum(axis=1)
    assert neighbours.clusters.shape == (1200, module.LIST_LENGTH)
    assert np.median(lengths) > 0.9 * module.LIST_LENGTH
    assert np.median(neighbours.errors) < 0.05 * np.median(-true_nearness(centroids))


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


def test_places_of_flags() -> None:
    random = np.random.default_rng(2)
    for size in (0, 1, 7, 8, 64, 1003):
        flags = random.random(size) < 0.05
        np.testing.assert_array_equal(module._true_places(flags), np.flatnonzero(flags))
