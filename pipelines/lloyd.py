"""The steps of k-means over pairs: points, seeds, assignment, means, new places for empty clusters.

Everything is a function of the vectors and the seed alone: assignments are exact (``nearest_centroids``), sums are
float64 in a fixed block order. Memory: one block of points, the centroids and their sums, 12 bytes a point.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from raytriever.pipelines.nearest_centroids import inner_products, most_similar_centroids, nearest_centroids

BLOCK_ROWS = 8192
SEEDING_SAMPLE = 4  # points looked at for each seed
SEEDING_GROWTH = 4  # a round draws a quarter as many seeds as there are


def midpoints(documents: NDArray[np.floating], queries: NDArray[np.floating]) -> NDArray[np.float32]:
    """(d + q)/2, float32 (n, dimension): what Eq. 3 clusters where a centroid is one vector for both sides."""
    points = documents.astype(np.float32)
    points += queries
    points *= 0.5
    return points


def concatenated(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float32]:
    """[first; second] at unit length, float32 (n, 2·dimension); a zero vector stays zero.

    [q; d] and the swapped [d; q] are the two vectors per pair of Morris & Rush 2024, section 4.1, after Eq. 3.
    """
    points = np.concatenate((first, second), axis=1, dtype=np.float32)
    lengths = np.sqrt(inner_products(points, points))
    points /= np.maximum(lengths, np.finfo(np.float64).tiny)[:, None]
    return points


class MidPoints:
    """Mid-points of N pairs, made block by block; clusters are means, costs squared Euclidean distances."""

    converged_cost: float = 0.0  # a point of no more cost sits on its centroid

    def __init__(self, documents: NDArray[np.floating], queries: NDArray[np.floating]) -> None:
        self._documents, self._queries = documents, queries

    def __len__(self) -> int:
        return len(self._documents)

    def take(self, places: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """The points at ``places``."""
        return midpoints(self._documents[places], self._queries[places])

    def assign(
        self, points: NDArray[np.float32], centroids: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The nearest centroid of each point and the squared distance."""
        return nearest_centroids(points, centroids)

    def centroids(self, sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Means."""
        return np.asarray(sums / np.maximum(counts, 1)[:, None], dtype=np.float32)


class ConcatenatedPairs:
    """[q; d] of N pairs, then [d; q] of the same, at unit length; costs are 1 - cosine, centroids have unit length."""

    converged_cost: float = 1e-6  # float32 unit vectors have lengths of 1 ± 1e-7

    def __init__(self, documents: NDArray[np.floating], queries: NDArray[np.floating]) -> None:
        self._documents, self._queries = documents, queries

    def __len__(self) -> int:
        return 2 * len(self._documents)

    def take(self, places: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """The points at ``places``, of which those from N on are swapped."""
        pairs = len(self._documents)
        if isinstance(places, slice):
            begin, end, _ = places.indices(len(self))
            if end <= pairs:
                return concatenated(self._queries[begin:end], self._documents[begin:end])
            if begin >= pairs:
                return concatenated(
                    self._documents[begin - pairs : end - pairs], self._queries[begin - pairs : end - pairs]
                )
            places = np.arange(begin, end)
        rows, swapped = places % pairs, (places >= pairs)[:, None]
        documents, queries = self._documents[rows], self._queries[rows]
        return concatenated(np.where(swapped, documents, queries), np.where(swapped, queries, documents))

    def assign(
        self, points: NDArray[np.float32], centroids: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The centroid with the largest inner product with each point and 1 - that product."""
        assignments, similarities = most_similar_centroids(points, centroids)
        return assignments, 1 - similarities

    def centroids(self, sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float32]:  # noqa: ARG002
        """Means at unit length."""
        lengths = np.sqrt(inner_products(sums, sums))
        return np.asarray(sums / np.maximum(lengths, np.finfo(np.float64).tiny)[:, None], dtype=np.float32)


class GatheredPoints:
    """Some points of ``whole``, held in memory."""

    def __init__(self, whole: "Points", places: slice | NDArray[np.int64]) -> None:
        self._whole, self._vectors = whole, whole.take(places)
        self.converged_cost: float = whole.converged_cost

    def __len__(self) -> int:
        return len(self._vectors)

    def take(self, places: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """The points at ``places`` of these."""
        return self._vectors[places]

    def assign(
        self, points: NDArray[np.float32], centroids: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """As the whole does."""
        return self._whole.assign(points, centroids)

    def centroids(self, sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """As the whole does."""
        return self._whole.centroids(sums, counts)


Points = MidPoints | ConcatenatedPairs | GatheredPoints


@dataclass(frozen=True)
class Assignment:
    """Every point's cluster and cost, and of every cluster the sum and number of its points."""

    clusters: NDArray[np.int32]  # (points,)
    costs: NDArray[np.float64]  # (points,)
    sums: NDArray[np.float64]  # (K, width)
    counts: NDArray[np.int64]  # (K,)

    @property
    def objective(self) -> float:
        """The sum of the costs, what k-means makes smaller."""
        return float(self.costs.sum())


def blocks(points: Points) -> Iterator[slice]:
    """Consecutive stretches of at most ``BLOCK_ROWS`` points."""
    for begin in range(0, len(points), BLOCK_ROWS):
        yield slice(begin, min(begin + BLOCK_ROWS, len(points)))


def cluster_sums(points: NDArray[np.floating], clusters: NDArray[np.integer], k: int) -> NDArray[np.float64]:
    """The sum of each cluster's points, float64 (k, width), added in the order of the points."""
    order = np.argsort(clusters, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(clusters, minlength=k))))
    members = csr_array((np.ones(len(order)), order, offsets), shape=(k, len(order)))
    sums: NDArray[np.float64] = members @ points.astype(np.float64)
    return sums


def assign(points: Points, centroids: NDArray[np.float32]) -> Assignment:
    """The assignment step of Lloyd's algorithm, with what the next step needs."""
    k = len(centroids)
    clusters = np.empty(len(points), dtype=np.int32)
    costs = np.empty(len(points), dtype=np.float64)
    sums = np.zeros(centroids.shape, dtype=np.float64)
    for part in blocks(points):
        block = points.take(part)
        clusters[part], costs[part] = points.assign(block, centroids)
        sums += cluster_sums(block, clusters[part], k)
    return Assignment(clusters, costs, sums, np.bincount(clusters, minlength=k))


def refill_empty(points: Points, assignment: Assignment) -> NDArray[np.int64]:
    """Moves, in place, one point into every empty cluster; returns the points moved, (moves, 2): cluster, point.

    Each comes from the cluster that is largest at that moment (the lowest of equals) and is its costliest point (the
    first of equals). Where that point sits on its centroid the next largest gives; where all do, there are fewer
    distinct points than clusters and the rest stay empty. The objective never grows.
    """
    empty = np.flatnonzero(assignment.counts == 0)
    moves: list[tuple[int, int]] = []
    if not len(empty):
        return np.empty((0, 2), dtype=np.int64)
    by_cluster = np.lexsort((-assignment.costs, assignment.clusters))
    first = np.concatenate(([0], np.cumsum(assignment.counts)))
    given = np.zeros(len(assignment.counts), dtype=np.int64)
    available = assignment.counts.copy()
    for cluster in empty.tolist():
        while (donor := int(available.argmax())) >= 0 and available[donor] > 1:
            point = int(by_cluster[first[donor] + given[donor]])
            if assignment.costs[point] > points.converged_cost:
                break
            available[donor] = 0
        if available[donor] <= 1:
            break
        given[donor] += 1
        available[donor] -= 1
        moves.append((cluster, point))
    for cluster, point in moves:
        _move(points, assignment, cluster, point)
    return np.array(moves, dtype=np.int64).reshape(-1, 2)


def _move(points: Points, assignment: Assignment, cluster: int, point: int) -> None:
    vector = points.take(np.array([point]))[0].astype(np.float64)
    donor = assignment.clusters[point]
    assignment.sums[donor] -= vector
    assignment.sums[cluster] = vector
    assignment.counts[donor] -= 1
    assignment.counts[cluster] = 1
    assignment.clusters[point] = cluster
    assignment.costs[point] = 0


@dataclass(frozen=True)
class Solution:
    """Where Lloyd's algorithm ended: ``assignment`` is to ``centroids``; ``objective`` at the start and after each
    iteration; ``refilled``: empty clusters that were given a point, over all iterations.
    """

    centroids: NDArray[np.float32]
    assignment: Assignment
    objective: tuple[float, ...]
    refilled: int


def lloyd(
    points: Points,
    centroids: NDArray[np.float32],
    iterations: int,
    tolerance: float,
    assign: Callable[[Points, NDArray[np.float32]], Assignment] = assign,
) -> Solution:
    """Lloyd's algorithm from ``centroids`` (K, width); ``assign`` is the assignment step.

    Stops after ``iterations`` or once the objective falls by no more than ``tolerance`` of itself.
    """
    assignment = assign(points, centroids)
    moves = refill_empty(points, assignment)
    objective, refilled = [assignment.objective], len(moves)
    for _ in range(iterations):
        centroids = points.centroids(assignment.sums, assignment.counts)
        assignment = assign(points, centroids)
        moves = refill_empty(points, assignment)
        refilled += len(moves)
        objective.append(assignment.objective)
        if objective[-2] - objective[-1] <= tolerance * objective[-2]:
            break
    centroids = centroids.copy()
    centroids[moves[:, 0]] = points.take(moves[:, 1])
    return Solution(centroids, assignment, tuple(objective), refilled)


def seed_centroids(points: Points, k: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """``k`` different points (k <= number of points), drawn in proportion to the squared distance from those before.

    k-means++ (Arthur & Vassilvitskii 2007) on a random sample of the points, in rounds: each draws a quarter as many
    seeds as there are, so the first are drawn one by one and thousands take some tens of matrix products.
    """
    size = min(len(points), max(1024, SEEDING_SAMPLE * k))
    sample = points.take(np.sort(rng.choice(len(points), size, replace=False)))
    chosen = [int(rng.integers(size))]
    distances = np.full(size, np.inf)
    newest = chosen
    while len(chosen) < k:
        distances = np.minimum(distances, nearest_centroids(sample, sample[newest])[1])
        distances[newest] = 0
        total = distances.sum()
        wanted = min(k - len(chosen), max(1, len(chosen) // SEEDING_GROWTH))
        if total > 0:
            wanted = min(wanted, int(np.count_nonzero(distances)))
            newest = rng.choice(size, wanted, replace=False, p=distances / total).tolist()
        else:  # no distinct points left in the sample: these clusters start empty
            newest = np.setdiff1d(np.arange(size), chosen)[:wanted].tolist()
        chosen += newest
    return sample[chosen]
