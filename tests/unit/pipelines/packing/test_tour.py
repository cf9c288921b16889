"""The tour is the literal greedy walk, step by step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.packing import neighbours as module
from pipelines.packing.neighbours import find_neighbours
from pipelines.packing.tour import greedy_tour, tour_length

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
    "one": np.ones((1, 3), np.float32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_literal_walk(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda: dtype)
    centroids = CASES[name]
    neighbours = find_neighbours(centroids)
    for start in {0, len(centroids) // 2, len(centroids) - 1}:
        assert greedy_tour(neighbours, start).tolist() == literal_tour(centroids, start)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_small_lattices(size: int, seed: int, data: st.DataObject) -> None:
    centroids = np.random.default_rng(seed).integers(-2, 3, (size, 2)).astype(np.float32)
    start = data.draw(st.integers(0, size - 1))
    assert greedy_tour(find_neighbours(centroids), start).tolist() == literal_tour(centroids, start)


def test_short_lists_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    centroids = RANDOM.standard_normal((400, 8)).astype(np.float32)
    expected = literal_tour(centroids, 7)
    for length in (1, 3, 400):
        monkeypatch.setattr(module, "LIST_LENGTH", length)
        assert greedy_tour(find_neighbours(centroids), 7).tolist() == expected


def test_tour_length() -> None:
    square = np.array([[0, 0], [0, 3], [4, 3], [4, 0]], dtype=np.float32)
    assert tour_length(square, np.array([0, 1, 2, 3])) == 10
    assert tour_length(square, np.array([0, 2, 1, 3])) == 14
    assert tour_length(square[:1], np.array([0])) == 0
    line = np.arange(10_000, dtype=np.float32)[:, None]
    assert tour_length(line, np.arange(10_000)) == 9_999
