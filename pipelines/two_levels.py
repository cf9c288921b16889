"""k-means with many clusters: √K cells first, clusters within each cell, then refinement across the cells' borders.

A pair is compared with √K cells and with the clusters of the few cells nearest to its own, so an iteration takes about
N·√K distances in place of N·K, which grows with the square of N where the average cluster size is given.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.lloyd import (
    BLOCK_ROWS,
    Assignment,
    GatheredPoints,
    Points,
    Solution,
    cluster_sums,
    lloyd,
    seed_centroids,
)
from raytriever.pipelines.nearest_centroids import squared_distances

NEAR_CELLS = 16  # cells, its own among them, whose clusters a point may join


def lloyd_in_two_levels(
    points: Points, k: int, iterations: int, tolerance: float, random: np.random.Generator
) -> Solution:
    """At most ``k`` clusters of ``points``; ``iterations`` and ``tolerance`` hold for each of the three stages.

    The objective is that of the refinement. Memory: also the points of the largest cell.
    """
    coarse = lloyd(points, seed_centroids(points, isqrt(k), random), iterations, tolerance)
    used, cells = np.unique(coarse.assignment.clusters, return_inverse=True)
    members = np.split(np.argsort(cells, kind="stable"), np.cumsum(np.bincount(cells))[:-1])
    shares = apportion(k, np.array([len(places) for places in members]))
    parts = []
    for places, share in zip(members, shares.tolist(), strict=True):
        cell = GatheredPoints(points, places)
        parts.append(lloyd(cell, seed_centroids(cell, share, random), iterations, tolerance))
    candidates = _clusters_nearby(coarse.centroids[used], shares)

    def assign(points: Points, centroids: NDArray[np.float32]) -> Assignment:
        return assign_nearby(points, centroids, members, candidates)

    fine = np.concatenate([part.centroids for part in parts])
    refined = lloyd(points, fine, iterations, tolerance, assign)
    refilled = coarse.refilled + sum(part.refilled for part in parts) + refined.refilled
    return Solution(refined.centroids, refined.assignment, refined.objective, refilled)


def assign_nearby(
    points: Points,
    centroids: NDArray[np.float32],
    members: list[NDArray[np.int64]],
    candidates: list[NDArray[np.int64]],
) -> Assignment:
    """The assignment step where the points ``members[i]`` choose among the clusters ``candidates[i]`` alone."""
    clusters = np.empty(len(points), dtype=np.int32)
    costs = np.empty(len(points), dtype=np.float64)
    sums = np.zeros(centroids.shape, dtype=np.float64)
    for places, allowed in zip(members, candidates, strict=True):
        for begin in range(0, len(places), BLOCK_ROWS):
            part = places[begin : begin + BLOCK_ROWS]
            block = points.take(part)
            chosen, costs[part] = points.assign(block, centroids[allowed])
            clusters[part] = allowed[chosen]
            sums[allowed] += cluster_sums(block, chosen, len(allowed))
    return Assignment(clusters, costs, sums, np.bincount(clusters, minlength=len(centroids)))


def apportion(k: int, sizes: NDArray[np.integer]) -> NDArray[np.int64]:
    """``k`` clusters shared out in proportion to ``sizes``, at least one each and at most one a point.

    ``len(sizes) <= k <= sizes.sum()``. Largest remainders first, the first of equals.
    """
    shares = np.clip(k * sizes // sizes.sum(), 1, sizes)
    remainders = k * sizes / sizes.sum() - shares
    while shares.sum() != k:
        step = 1 if shares.sum() < k else -1
        open_cells = shares < sizes if step > 0 else shares > 1
        chosen = int(np.where(open_cells, step * remainders, -np.inf).argmax())
        shares[chosen] += step
        remainders[chosen] -= step
    return np.asarray(shares, dtype=np.int64)


def _clusters_nearby(cells: NDArray[np.float32], shares: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each cell the clusters, ascending, of the cells nearest to it; clusters are numbered cell after cell."""
    first = np.concatenate(([0], np.cumsum(shares)))
    nearby = []
    for cell in cells:
        nearest = np.sort(np.argsort(squared_distances(cells, cell), kind="stable")[:NEAR_CELLS])
        nearby.append(np.concatenate([np.arange(first[near], first[near + 1]) for near in nearest]))
    return nearby
