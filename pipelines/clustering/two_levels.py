"""k-means with many clusters: √K cells first, clusters within each cell, then refinement across the cells' borders.

Cells are those of a sample; within them points are compared with the cell's own clusters alone. Then every point is
compared, a few times over, with the clusters of the few cells nearest to its own. So clustering takes about N·√K
distances an iteration in place of N·K, which grows with the square of N where the average cluster size is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.clustering.lloyd import SEEDING_SAMPLE, Solution, assign, lloyd, seed_centroids
from raytriever.pipelines.clustering.nearest_centroids import squared_distances
from raytriever.pipelines.clustering.parts import LocalParts, Split, cut
from raytriever.pipelines.clustering.points import Points

SAMPLE_PER_CELL = 256  # points that each cell's centroid is the mean of, about
NEAR_CELLS = 8  # cells, its own among them, whose clusters a point may join
REFINEMENTS = 2  # iterations across the borders, at most


@dataclass(frozen=True)
class Limits:
    """When Lloyd's algorithm stops: after ``iterations``, or once the objective falls by ``tolerance`` of itself."""

    iterations: int
    tolerance: float


def cell_sample(k: int) -> int:
    """How many points the √K cells are sought among."""
    return SAMPLE_PER_CELL * isqrt(k)


def lloyd_in_two_levels(
    points: Points, split: Split, sample: Points, k: int, limits: Limits, seed: Sequence[int]
) -> Solution:
    """At most ``k`` clusters of ``points``; ``clusters`` of the solution is one array, of all.

    ``split`` makes parts of descriptions, ``sample`` are some of the points. ``limits`` hold for the cells and within
    each; the objective is that of the refinement. Memory: also the points of the largest cell, where it is clustered.
    """
    random = np.random.default_rng(seed)
    seeds = seed_centroids(sample.take(slice(None)), isqrt(k), random)
    coarse = lloyd(split(cut(sample)), seeds, limits.iterations, limits.tolerance)
    used, cells = np.unique(np.concatenate(assign(split(cut(points)), coarse.centroids).clusters), return_inverse=True)
    members = np.split(np.argsort(cells, kind="stable"), np.cumsum(np.bincount(cells))[:-1])
    shares = apportion(k, np.array([len(places) for places in members]))

    in_cells = split([points.subset(places) for places in members])
    each = [(share, (*seed, number)) for number, share in enumerate(shares.tolist())]
    fine = [(np.empty(0, dtype=np.float32), 0)] * len(members)
    for number, found in in_cells.map(cluster_cell, limits, each=each):
        fine[number] = found
    near = _clusters_nearby(coarse.centroids[used], [len(centroids) for centroids, _ in fine])
    centroids = np.concatenate([centroids for centroids, _ in fine])
    refined = lloyd(in_cells, centroids, min(limits.iterations, REFINEMENTS), limits.tolerance, near)
    clusters = np.empty(len(points), dtype=np.int32)
    for places, found_clusters in zip(members, refined.clusters, strict=True):
        clusters[places] = found_clusters
    refilled = coarse.refilled + sum(moves for _, moves in fine) + refined.refilled
    return Solution(refined.centroids, [clusters], refined.objective, refilled)


def cluster_cell(
    cell: Points, limits: Limits, share_and_seed: tuple[int, Sequence[int]]
) -> tuple[NDArray[np.float32], int]:
    """Clusters one cell's points alone: centroids float32 (share, width) and how many clusters were refilled."""
    share, seed = share_and_seed
    random = np.random.default_rng(seed)
    whole = LocalParts([cell if cell.keep else cell.subset(slice(None))])  # else its points are given up afterwards
    chosen = random.choice(len(cell), min(len(cell), SEEDING_SAMPLE * share), replace=False)
    seeds = seed_centroids(whole.points[0].take(np.sort(chosen)), share, random)
    found = lloyd(whole, seeds, limits.iterations, limits.tolerance)
    return found.centroids, found.refilled


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


def _clusters_nearby(cells: NDArray[np.float32], shares: Sequence[int]) -> list[NDArray[np.int64]]:
    """For each cell the clusters, ascending, of the cells nearest to it; clusters are numbered cell after cell."""
    first = np.concatenate(([0], np.cumsum(shares)))
    nearby = []
    for cell in cells:
        nearest = np.sort(np.argsort(squared_distances(cells, cell), kind="stable")[:NEAR_CELLS])
        nearby.append(np.concatenate([np.arange(first[near], first[near + 1]) for near in nearest]))
    return nearby
