"""The greedy nearest-neighbour tour over cluster centroids, exact, without reading every centroid at every step.

Contextual Document Embeddings (Morris & Rush 2024, arXiv:2410.02525, section 4.1 "Packing" and "TSP Packing" of the
appendix) packs clusters into batches along a greedy travelling-salesman tour: from the current cluster to the
unvisited one with the nearest centroid. Taken literally, each of the K steps reads all K centroids.

Here one blocked matrix product lists, for every cluster, the clusters near it; the walk takes the nearest unvisited
one of the list, and where the list is used up it looks at all survivors once. The product may be rounded coarsely
(bfloat16 where the processor multiplies in it): an error bound tells which entries could be the nearest, and these
few are compared in float64. So the order is that of the literal walk, on any processor and any number of threads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.pipelines.nearest_centroids import product_dtype, squared_distances
from raytriever.retrieval.errors import UserError

BLOCK_ROWS = 128  # lists made by one matrix product
LIST_LENGTH = 96  # what a list holds on average
LONGEST_LIST = 8 * LIST_LENGTH
SAMPLE_STRIDE = 16  # a list's threshold is read off every 16th product


@dataclass(frozen=True)
class Neighbours:
    """Everything near each of K centroids; of use for any number of tours over them.

    Nearness of y to x is x·y - |y|²/2, the order of the distances from x. Cluster i's list is
    ``clusters[offsets[i]:offsets[i + 1]]``, ascending, with its ``nearness``; what isn't on it has a computed nearness
    below ``thresholds[i]``. ``points`` (K, dimension + 1) float32 are the centred centroids y with -|y|²/2 behind.
    """

    centroids: NDArray[np.floating]
    points: NDArray[np.float32]
    norms: NDArray[np.float64]
    offsets: NDArray[np.int64]
    clusters: NDArray[np.int32]
    nearness: NDArray[np.float32]
    thresholds: NDArray[np.float32]
    unit_roundoff: float  # of the products behind ``nearness``


def find_neighbours(centroids: NDArray[np.floating]) -> Neighbours:
    """Lists the clusters near each of the ``centroids`` (K, dimension), about ``LIST_LENGTH`` each.

    K² · dimension multiplications in blocks; memory about K · (14 · dimension + 2000) bytes. Raises ``UserError`` for
    an empty or non-finite array.
    """
    _check(centroids)
    centred = centroids.astype(np.float64)
    centred -= centred.mean(axis=0)  # distances stay, rounding errors shrink
    squares = np.einsum("ij,ij->i", centred, centred)
    points = np.concatenate((centred, -squares[:, None] / 2), axis=1, dtype=np.float32, casting="same_kind")
    dtype = product_dtype()
    right = torch.from_numpy(points).to(dtype).T
    blocks = [_list_block(points[i : i + BLOCK_ROWS], right) for i in range(0, len(points), BLOCK_ROWS)]
    counts = np.concatenate([block[0] for block in blocks])
    return Neighbours(
        centroids,
        points,
        np.sqrt(squares),
        np.concatenate(([0], np.cumsum(counts))),
        np.concatenate([block[1] for block in blocks]),
        np.concatenate([block[2] for block in blocks]),
        np.concatenate([block[3] for block in blocks]),
        torch.finfo(dtype).eps / 2,
    )


def greedy_tour(neighbours: Neighbours, start: int) -> NDArray[np.int64]:
    """Order (K,) int64 in which a greedy walk from cluster ``start`` visits all clusters.

    The next cluster is the unvisited one at the smallest Euclidean distance (float64), the lowest index on ties.
    Raises ``UserError`` for a start outside 0..K-1.
    """
    size = len(neighbours.centroids)
    if not 0 <= start < size:
        raise UserError(f"The tour can't start at cluster {start}: there are {size}, counted from 0.")
    walk = _Walk(neighbours)
    order = np.empty(size, dtype=np.int64)
    order[0] = start
    walk.visit(start)
    for step in range(1, size):
        order[step] = walk.next_after(int(order[step - 1]))
        walk.visit(int(order[step]))
    return order


def tour_length(centroids: NDArray[np.floating], order: NDArray[np.integer]) -> float:
    """Sum of the Euclidean distances between consecutive clusters of ``order``; the tour isn't closed."""
    total = 0.0
    for begin in range(0, len(order) - 1, 4096):
        stops = centroids[order[begin : begin + 4097]].astype(np.float64)
        total += float(np.sqrt(np.square(np.diff(stops, axis=0)).sum(axis=1)).sum())
    return total


def _check(centroids: NDArray[np.floating]) -> None:
    if centroids.ndim != 2 or not len(centroids):
        raise UserError(f"A tour needs centroids of shape (clusters, dimension), clusters > 0; got {centroids.shape}.")
    finite = np.isfinite(centroids).all(axis=1)
    if not finite.all():
        raise UserError(f"Centroid {int(np.argmin(finite))} holds a NaN or an infinity: there is no distance to it.")


def _list_block(
    points: NDArray[np.float32], right: torch.Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Counts, clusters, nearness and thresholds of the lists of a block of ``points``."""
    left = torch.from_numpy(points.copy())
    left[:, -1] = 1
    nearness = (left.to(right.dtype) @ right).float().numpy()
    size = nearness.shape[1]
    stride = min(SAMPLE_STRIDE, max(1, size // 1024))
    place = max(0, len(range(0, size, stride)) - LIST_LENGTH // stride)
    thresholds = np.partition(nearness[:, ::stride], place, axis=1)[:, place]
    near = nearness >= thresholds[:, None]
    overlong = np.count_nonzero(near, axis=1) > LONGEST_LIST  # (near-)identical centroids: the walk looks at all
    near[overlong] = False
    thresholds[overlong] = np.inf
    places = np.flatnonzero(near)
    rows, clusters = np.divmod(places, size)
    counts = np.bincount(rows, minlength=len(points))
    return counts, clusters.astype(np.int32), nearness.ravel()[places], thresholds


class _Walk:
    """The clusters not yet visited."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._lists = neighbours
        self._unvisited = np.ones(len(neighbours.centroids), dtype=bool)
        self._survivors = np.arange(len(neighbours.centroids), dtype=np.int32)
        self._survivor_points = neighbours.points
        self._largest_norm = float(neighbours.norms.max())

    def visit(self, cluster: int) -> None:
        self._unvisited[cluster] = False

    def next_after(self, cluster: int) -> int:
        """The unvisited cluster nearest to ``cluster``, the lowest index on ties."""
        lists = self._lists
        part = slice(lists.offsets[cluster], lists.offsets[cluster + 1])
        threshold = float(lists.thresholds[cluster])
        found = self._nearest(cluster, lists.clusters[part], lists.nearness[part], threshold, lists.unit_roundoff)
        return self._nearest_of_all(cluster) if found is None else found

    def _nearest_of_all(self, cluster: int) -> int:
        kept = self._unvisited[self._survivors]
        if 8 * int(kept.sum()) <= 7 * len(kept):  # copying pays once an eighth is gone
            self._survivors, self._survivor_points = self._survivors[kept], self._survivor_points[kept]
        query = self._lists.points[cluster].copy()
        query[-1] = 1
        nearness = self._survivor_points @ query
        found = self._nearest(cluster, self._survivors, nearness, -np.inf, 2.0**-24)
        if found is None:
            raise RuntimeError("the walk has visited every cluster already")
        return found

    def _nearest(
        self,
        cluster: int,
        candidates: NDArray[np.int32],
        nearness: NDArray[np.float32],
        threshold: float,
        unit_roundoff: float,
    ) -> int | None:
        """The nearest unvisited candidate; None if there is none, or one below ``threshold`` could be as near."""
        alive = self._unvisited[candidates]
        candidates, nearness = candidates[alive], nearness[alive]
        if not len(candidates):
            return None
        square = float(self._squared_distances(cluster, candidates[nearness.argmax(), None])[0])
        norm = float(self._lists.norms[cluster])
        bound = self._lower_bound(norm, square, unit_roundoff)
        if bound < threshold:
            return None
        contenders = candidates[nearness >= bound]
        if len(contenders) == 1:
            return int(contenders[0])
        return int(contenders[self._squared_distances(cluster, contenders).argmin()])

    def _lower_bound(self, norm: float, square: float, unit_roundoff: float) -> float:
        """The smallest computed nearness to a point of that ``norm`` that a point within distance √``square`` can have.

        Such a point's own norm is at most norm + √square. First-order rounding of both inputs and of the result, then
        twice that of a float32 sum of dimension + 1 terms, which covers the centring and the second order.
        """
        other = min(norm + float(np.sqrt(square)), self._largest_norm)
        exact = (norm**2 - square) / 2
        terms = self._lists.points.shape[1] + 8
        rounding = unit_roundoff * (2 * norm * other + other**2 / 2 + abs(exact))
        return float(exact - 1.01 * rounding - terms * 2.0**-23 * (norm + other) * other)

    def _squared_distances(self, cluster: int, others: NDArray[np.int32]) -> NDArray[np.float64]:
        return squared_distances(self._lists.centroids[others], self._lists.centroids[cluster])
