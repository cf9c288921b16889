"""The greedy nearest-neighbour tour over cluster centroids, exact and without a pass over all of them a step.

Contextual Document Embeddings (Morris & Rush 2024, arXiv:2410.02525, section 4.1 "Packing" and section 10.4
"TSP Packing") packs clusters into batches along a greedy travelling-salesman tour: from the current cluster to the
unvisited one with the nearest centroid. Taken literally each of the K steps reads all K centroids.

Here the distances of a few hundred neighbouring clusters are computed together, as one matrix product against the
clusters that are still unvisited, and each keeps the list of those below a threshold. The walk takes the nearest
unvisited entry of the list; where a list is used up, one pass over the survivors finds the next cluster and starts
the next block. Every choice that float32 rounding could have changed is repeated in float64, so the order is that of
the literal walk, on any number of threads.
"""

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError

BLOCK_ROWS = 256  # clusters whose lists are computed together
LIST_LENGTH = 48  # aimed at; a list holds everything below its threshold
SAMPLE_STRIDE = 16  # thresholds are read off every 16th distance


def greedy_tour(centroids: NDArray[np.floating], start: int) -> NDArray[np.int64]:
    """Order (K,) int64 in which a greedy walk from cluster ``start`` visits the ``centroids`` (K, dimension).

    The next cluster is the unvisited one at the smallest Euclidean distance, the lowest index on ties.
    Working memory: about 4·K·(dimension + 256) bytes. Raises ``UserError`` for an empty or non-finite array
    and for a start outside it.
    """
    _check(centroids, start)
    walk = _Walk(centroids)
    order = np.empty(len(centroids), dtype=np.int64)
    order[0] = current = start
    walk.visit(start)
    for step in range(1, len(order)):
        order[step] = current = walk.next_after(current)
        walk.visit(current)
    return order


def tour_length(centroids: NDArray[np.floating], order: NDArray[np.integer]) -> float:
    """Sum of the Euclidean distances between consecutive clusters of ``order``; the tour isn't closed."""
    total = 0.0
    for begin in range(0, len(order) - 1, 4096):
        stops = centroids[order[begin : begin + 4097]].astype(np.float64)
        total += float(np.sqrt(np.square(np.diff(stops, axis=0)).sum(axis=1)).sum())
    return total


def _check(centroids: NDArray[np.floating], start: int) -> None:
    if centroids.ndim != 2 or not len(centroids):
        raise UserError(f"A tour needs centroids of shape (clusters, dimension), clusters > 0; got {centroids.shape}.")
    finite = np.isfinite(centroids).all(axis=1)
    if not finite.all():
        raise UserError(f"Centroid {int(np.argmin(finite))} holds a NaN or an infinity: there is no distance to it.")
    if not 0 <= start < len(centroids):
        raise UserError(f"The tour can't start at cluster {start}: there are {len(centroids)}, counted from 0.")


class _Walk:
    """The unvisited clusters and, for some clusters, the list of those near them.

    Nearness of y to x is x·y - |y|²/2: the distance's order for a fixed x, and one product of x with a 1 appended
    and y with -|y|²/2 appended.
    """

    def __init__(self, centroids: NDArray[np.floating]) -> None:
        self._exact = centroids
        centred = centroids.astype(np.float64)
        centred -= centred.mean(axis=0)  # distances stay, rounding shrinks
        squares = np.einsum("ij,ij->i", centred, centred)
        self._points = np.empty((len(centroids), centroids.shape[1] + 1), dtype=np.float32)
        self._points[:, :-1] = centred
        self._points[:, -1] = -squares / 2
        # float32 rounding of inputs and of a dot product of dimension + 1 terms: below (terms + 8) · 2⁻²⁴ · 2 max|y|²
        self._tolerance = (self._points.shape[1] + 8) * 2.0**-23 * float(squares.max())
        self._unvisited = np.ones(len(centroids), dtype=bool)
        self._lists: dict[int, tuple[NDArray[np.int64], NDArray[np.float32], float]] = {}
        self._listed = np.zeros(len(centroids), dtype=bool)
        self._survivors = np.arange(len(centroids))
        self._survivor_points = self._points
        self._number_visited_since = 0

    def visit(self, cluster: int) -> None:
        """Marks ``cluster``; once an eighth of the survivors are visited, the survivors close ranks."""
        self._unvisited[cluster] = False
        self._number_visited_since += 1
        if 8 * self._number_visited_since >= len(self._survivors):
            kept = self._unvisited[self._survivors]
            self._survivors = self._survivors[kept]
            self._survivor_points = self._survivor_points[kept]
            self._number_visited_since = 0

    def next_after(self, cluster: int) -> int:
        """The unvisited cluster nearest to ``cluster``, the lowest index on ties."""
        if not self._listed[cluster]:
            self._list_neighbourhood(cluster)
        ids, nearness, threshold = self._lists.pop(cluster)
        found = self._nearest(cluster, ids, nearness, threshold)
        if found is None:
            found = self._nearest(cluster, self._survivors, self._nearness_of_survivors(cluster), -np.inf)
        return int(found)  # type: ignore[arg-type]

    def _nearest(
        self, cluster: int, ids: NDArray[np.int64], nearness: NDArray[np.float32], threshold: float
    ) -> int | None:
        """The nearest unvisited of ``ids``; None where something below ``threshold`` could be as near."""
        alive = self._unvisited[ids]
        ids, nearness = ids[alive], nearness[alive]
        if not len(ids):
            return None
        bound = float(nearness.max()) - 2 * self._tolerance
        if bound < threshold:
            return None
        contenders = ids[nearness >= bound]
        if len(contenders) == 1:
            return int(contenders[0])
        difference = self._exact[contenders].astype(np.float64) - self._exact[cluster].astype(np.float64)
        return int(contenders[np.einsum("ij,ij->i", difference, difference).argmin()])

    def _nearness_of_survivors(self, cluster: int) -> NDArray[np.float32]:
        return self._survivor_points @ _query(self._points[cluster])

    def _list_neighbourhood(self, cluster: int) -> None:
        """Makes the lists of ``cluster`` and of the unlisted survivors nearest to it."""
        nearness = self._nearness_of_survivors(cluster)
        wanted = self._unvisited[self._survivors] & ~self._listed[self._survivors]
        candidates, nearness = self._survivors[wanted], nearness[wanted]
        if len(candidates) >= BLOCK_ROWS:
            candidates = candidates[np.argpartition(-nearness, BLOCK_ROWS - 2)[: BLOCK_ROWS - 1]]
        rows = np.append(candidates, cluster)
        block = _query(self._points[rows]) @ self._survivor_points.T
        stride = min(SAMPLE_STRIDE, max(1, block.shape[1] // 1024))
        sample = block[:, ::stride]
        rank = min(max(2, LIST_LENGTH // stride), sample.shape[1])
        thresholds = np.partition(sample, sample.shape[1] - rank, axis=1)[:, sample.shape[1] - rank]
        places = np.flatnonzero(block >= thresholds[:, None])
        row_of, column_of = np.divmod(places, block.shape[1])
        values, ids = block.ravel()[places], self._survivors[column_of]
        bounds = np.searchsorted(row_of, np.arange(len(rows) + 1))
        for i, row in enumerate(rows.tolist()):
            part = slice(bounds[i], bounds[i + 1])
            self._lists[row] = ids[part], values[part], float(thresholds[i])
        self._listed[rows] = True


def _query(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """``points`` (..., dimension + 1) with a 1 in the last place."""
    query = points.copy()
    query[..., -1] = 1
    return query
