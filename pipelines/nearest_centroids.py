"""Exact assignment of points to centroids at the speed of a coarse matrix product.

The products may be rounded coarsely (bfloat16 where the processor multiplies in it). An error bound tells which
centroids could be a point's best; where there are several, they are compared in float64. So the assignment is that of
float64 arithmetic, the lowest index on ties, on any processor and any number of threads.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

PRODUCTS_AT_ONCE = 1 << 21
PAIRS_AT_ONCE = 1 << 12
CACHED_ROWS = 128  # float64 copies of so many rows stay in the processor's cache

# float64 cost of each row of the first array with the same row of the second
Cost = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.float64]]


def nearest_centroids(
    points: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The centroid at the smallest Euclidean distance from each point, and that distance squared.

    ``points`` (n, dimension), ``centroids`` (K, dimension), finite. Returns (n,) int32 and (n,) float64.
    Nearness is compared as x·c - |c|²/2 = (|x|² - |x - c|²)/2, all centred to shrink rounding errors.
    """
    centre = centroids.mean(axis=0, dtype=np.float64).astype(np.float32)
    halves = _squared_lengths(centroids - centre) / 2

    def score(costs: NDArray[np.float64], squares: NDArray[np.float64]) -> NDArray[np.float64]:
        return (squares - costs) / 2

    return _assign(points, centroids, centre, halves, squared_distances, score)


def most_similar_centroids(
    points: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The centroid with the largest inner product with each point, and that inner product.

    ``points`` (n, dimension), ``centroids`` (K, dimension), finite. Returns (n,) int32 and (n,) float64.
    """

    def score(costs: NDArray[np.float64], squares: NDArray[np.float64]) -> NDArray[np.float64]:  # noqa: ARG001
        return -costs

    def cost(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
        return -inner_products(left, right)

    zero = np.zeros(centroids.shape[1], dtype=np.float32)
    assignments, costs = _assign(points, centroids, zero, np.zeros(len(centroids)), cost, score)
    return assignments, -costs


def squared_distances(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """|left - right|² row by row, float64; no BLAS, so it does not depend on threads. ``right`` may be one row."""
    right = np.broadcast_to(right, left.shape)
    squares = np.empty(len(left), dtype=np.float64)
    for begin in range(0, len(left), CACHED_ROWS):
        part = slice(begin, begin + CACHED_ROWS)
        difference = left[part].astype(np.float64)
        difference -= right[part]
        squares[part] = np.einsum("ij,ij->i", difference, difference)
    return squares


def inner_products(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """left·right row by row, float64; no BLAS, so it does not depend on threads."""
    products = np.empty(len(left), dtype=np.float64)
    for begin in range(0, len(left), CACHED_ROWS):
        part = slice(begin, begin + CACHED_ROWS)
        products[part] = np.einsum("ij,ij->i", left[part].astype(np.float64), right[part].astype(np.float64))
    return products


def product_dtype() -> torch.dtype:
    """bfloat16 where this processor has instructions for it (several times faster than float32)."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


def _squared_lengths(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    return inner_products(rows, rows)


def _assign(
    points: NDArray[np.float32],
    centroids: NDArray[np.float32],
    centre: NDArray[np.float32],
    halves: NDArray[np.float64],
    cost: Cost,
    score: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The lowest ``cost``, which is the highest ``score`` = (x - centre)·(c - centre) - half of c."""
    dtype = product_dtype()
    right = torch.from_numpy(centroids - centre).to(dtype).T
    longest = float(np.sqrt(_squared_lengths(centroids - centre).max()))
    assignments = np.empty(len(points), dtype=np.int32)
    costs = np.empty(len(points), dtype=np.float64)
    rows = min(2048, max(128, PRODUCTS_AT_ONCE // len(centroids)))
    for begin in range(0, len(points), rows):
        part = slice(begin, begin + rows)
        shifted = points[part] - centre
        scores = (torch.from_numpy(shifted).to(dtype) @ right).float().numpy()
        scores -= halves.astype(np.float32)
        best = scores.argmax(axis=1)
        costs[part] = cost(points[part], centroids[best])
        squares = _squared_lengths(shifted)
        lowest = score(costs[part], squares) - _rounding(dtype, centroids.shape[1], np.sqrt(squares), longest)
        candidates = scores >= lowest.astype(np.float32)[:, None]
        assignments[part] = best
        _settle(points[part], centroids, candidates, cost, assignments[part], costs[part])
    return assignments, costs


def _rounding(dtype: torch.dtype, dimension: int, lengths: NDArray[np.float64], longest: float) -> NDArray[np.float64]:
    """Bound on the error of a computed score of points and centroids of these lengths.

    Rounding of both inputs and of the result, then of a float32 sum, doubled to cover the centring and second order.
    """
    coarse = 3.03 * torch.finfo(dtype).eps / 2 * lengths * longest
    return coarse + (dimension + 8) * 2.0**-23 * (lengths * longest + longest**2 / 2 + lengths**2)


def _settle(
    points: NDArray[np.float32],
    centroids: NDArray[np.float32],
    candidates: NDArray[np.bool_],
    cost: Cost,
    assignments: NDArray[np.int32],
    costs: NDArray[np.float64],
) -> None:
    """Chooses, in place, among the candidates of the points that have several."""
    open_rows = np.flatnonzero(np.count_nonzero(candidates, axis=1) > 1)
    rows, columns = np.nonzero(candidates[open_rows])
    if not len(rows):
        return
    rows = open_rows[rows]
    exact = np.empty(len(rows), dtype=np.float64)
    for begin in range(0, len(rows), PAIRS_AT_ONCE):
        part = slice(begin, begin + PAIRS_AT_ONCE)
        exact[part] = cost(points[rows[part]], centroids[columns[part]])
    order = np.lexsort((columns, exact, rows))
    first = order[np.searchsorted(rows, open_rows)]  # rows ascend, so a row's candidates keep their places
    assignments[open_rows], costs[open_rows] = columns[first], exact[first]
