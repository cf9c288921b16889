"""The greedy nearest-neighbour tour over cluster centroids, exact, without reading every centroid at every step.

Contextual Document Embeddings (Morris & Rush 2024, arXiv:2410.02525, section 4.1 "Packing" and "TSP Packing" of the
appendix) packs clusters into batches along a greedy travelling-salesman tour. It goes from the current cluster to the
unvisited one with the nearest centroid. Taken literally, each of the K steps reads all K centroids.

Here every cluster has a list of near ones. The walk takes the nearest unvisited one of the list. If the list is used
up, it looks at all survivors once. The lists' nearness is coarse, so an error bound tells which entries could be the
nearest, and these few are compared in float64. So the order is that of the literal walk, on any processor and any
number of threads.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import CACHED_ROWS, squared_distances
from pipelines.packing.neighbours import Neighbours

TINY = 1e-30  # squared differences of this size may be lost


def greedy_tour(neighbours: Neighbours, start: int) -> NDArray[np.int64]:
    """The order, int64 (K,), of a greedy walk from cluster ``start`` through all clusters.

    The next cluster is the unvisited one at the smallest Euclidean distance (float64), the lowest index on ties.
    """
    size = len(neighbours.centroids)
    walk = _Walk(neighbours)
    order = np.empty(size, dtype=np.int64)
    order[0] = current = start
    walk.visit(start)
    with np.errstate(over="ignore"):  # of float32 squares; an infinite one is looked at again in float64
        for step in range(1, size):
            order[step] = current = walk.next_after(current)
            walk.visit(current)
    return order


class _Walk:
    """The clusters not yet visited."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._centroids = neighbours.centroids
        self._clusters = neighbours.clusters
        self._nearness = neighbours.nearness
        self._thresholds: list[float] = neighbours.thresholds.tolist()
        self._errors: list[float] = neighbours.errors.tolist()
        self._unvisited = np.ones(len(neighbours.centroids), dtype=bool)
        self._survivors = _Survivors(neighbours.centroids)

    def visit(self, cluster: int) -> None:
        self._unvisited[cluster] = False

    def next_after(self, cluster: int) -> int:
        """The unvisited cluster nearest to ``cluster``, the lowest index on ties."""
        listed = self._clusters[cluster]
        places = self._unvisited.take(listed).nonzero()[0]
        if len(places):
            nearness = self._nearness[cluster].take(places)
            best, error = nearness.item(0), self._errors[cluster]
            if best - error > self._thresholds[cluster]:
                contenders = listed.take(places[nearness >= best - 2 * error])
                return contenders.item() if len(contenders) == 1 else _nearest(self._centroids, cluster, contenders)
        return _nearest(self._centroids, cluster, self._survivors.near(cluster, self._unvisited))


class _Survivors:
    """The points not yet visited, looked at whole at a dead end."""

    def __init__(self, centroids: NDArray[np.floating]) -> None:
        self._centroids = centroids
        self._centre = centroids.mean(axis=0, dtype=np.float64)  # distances stay, rounding errors shrink
        longest = float(np.sqrt(squared_distances(centroids, self._centre).max()))
        self._unit = float(2.0 ** np.ceil(np.log2(longest))) if longest > 0 else 1.0
        self._begin(np.array([], dtype=np.int32))

    def _begin(self, clusters: NDArray[np.int32]) -> None:
        self._clusters = clusters
        self._points = np.empty((len(clusters), self._centroids.shape[1] + 1), dtype=np.float32)
        for begin in range(0, len(clusters), CACHED_ROWS):
            part = slice(begin, begin + CACHED_ROWS)
            self._points[part] = self._centred(clusters[part])

    def near(self, cluster: int, unvisited: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Unvisited clusters near ``cluster``, the nearest among them."""
        kept = unvisited[self._clusters].nonzero()[0]
        if 4 * len(kept) <= 3 * len(self._clusters):  # copying pays once a fourth is gone
            if not len(kept):
                self._begin(np.flatnonzero(unvisited).astype(np.int32))
            else:
                self._clusters, self._points = self._clusters[kept], self._points[kept]
            kept = np.arange(len(self._clusters))
        query = self._centred(np.array([cluster]))[0]
        query[-1] = 1
        nearness = (self._points @ query)[kept]  # x·y - |y|²/2
        clusters = self._clusters[kept]
        nearest = self._centroids[clusters[nearness.argmax(), None]]
        square = float(squared_distances(nearest, self._centroids[cluster])[0]) / self._unit**2
        lowest = self._lower_bound(float(np.linalg.norm(query[:-1].astype(np.float64))), square)
        return np.asarray(clusters[nearness >= lowest])

    def _centred(self, clusters: NDArray[np.integer]) -> NDArray[np.float32]:
        """Points in the unit, with -|y|²/2 behind."""
        points = (self._centroids[clusters] - self._centre) / self._unit
        squares = np.einsum("ij,ij->i", points, points)
        return np.concatenate((points, -squares[:, None] / 2), axis=1).astype(np.float32)

    def _lower_bound(self, norm: float, square: float) -> float:
        """The smallest computed nearness to a point of that ``norm`` that a point within distance √``square`` can have.

        Such a point's own norm is at most norm + √square. The error is twice that of a float32 sum of dimension + 1
        terms, and the rounding of both inputs and of the result, which is less than twice that of one more. Twice
        covers the centring and the second order.
        """
        other = norm + square**0.5
        terms = self._points.shape[1] + 9
        return float((norm**2 - square) / 2 - terms * 2.0**-23 * (norm + other) * other - 2.0**-100)


def _nearest(centroids: NDArray[np.floating], cluster: int, others: NDArray[np.int32]) -> int:
    """The one of ``others`` at the smallest distance (float64), the lowest index on ties.

    A float32 sum of squared differences is off by less than dimension + 4 units of 2⁻²⁴: seldom are two that near.
    """
    if len(others) > CACHED_ROWS:
        others = np.sort(others)
        return int(others[squared_distances(centroids[others], centroids[cluster]).argmin()])
    differences = centroids.take(others, axis=0).astype(np.float32, copy=False)
    differences -= centroids[cluster]
    squares = np.vecdot(differences, differences)
    nearest = int(squares.argmin())
    close = squares <= squares[nearest] * (1 + (centroids.shape[1] + 8) * 2.0**-22) + TINY
    if np.count_nonzero(close) == 1:
        return int(others[nearest])
    others = np.sort(others[close])
    return int(others[squared_distances(centroids[others], centroids[cluster]).argmin()])
