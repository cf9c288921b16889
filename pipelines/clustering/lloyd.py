"""The steps of k-means over points in parts: seeds, assignment, means, new places for empty clusters.

Everything is a function of the vectors and the seed alone: assignments are exact (``nearest_centroids``), sums are
exact (``points``), so neither parts nor workers nor threads matter. Memory here: the centroids, their sums, and 4 bytes
a point; a part's own is that of one block, or of its points where they are held.

``divide`` cuts what would take one task too long. Its parts have one size, and near points share a part.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import CentroidSearch, inner_products, nearest_centroids
from pipelines.clustering.points import BLOCK_ROWS, Parts, Points

SEEDING_SAMPLE = 4  # points looked at for each seed
SEEDING_GROWTH = 2  # a round draws half as many seeds as exist
SUMMED_ROWS = 2048  # rows copied to float64 at once


@dataclass(frozen=True)
class Assignment:
    """Every point's cluster, part by part, and of every cluster the sum and number of its points."""

    clusters: list[NDArray[np.int32]]  # of each part
    sums: NDArray[np.float64]  # (K, width)
    counts: NDArray[np.int64]  # (K,)


@dataclass(frozen=True)
class Candidate:
    """A point that may leave its cluster, the ``donor``."""

    donor: int
    cost: float
    part: int
    place: int
    point: NDArray[np.float32]


@dataclass(frozen=True)
class Solution:
    """The result of Lloyd's algorithm: ``clusters`` of each part's points, numbers of ``centroids``.

    ``objective``: the sum of costs at the start and after each iteration. ``refilled``: empty clusters that were given
    a point, over all iterations.
    """

    centroids: NDArray[np.float32]
    clusters: list[NDArray[np.int32]]
    objective: tuple[float, ...]
    refilled: int


def cluster_sums(points: NDArray[np.floating], clusters: NDArray[np.integer], k: int) -> NDArray[np.float64]:
    """The sum of each cluster's points, float64 (k, width), added in the order of the points."""
    from scipy.sparse import csr_array

    sums = np.zeros((k, points.shape[1]))
    for begin in range(0, len(points), max(SUMMED_ROWS, k)):
        part = slice(begin, begin + max(SUMMED_ROWS, k))
        chosen = clusters[part]
        order = np.argsort(chosen, kind="stable")
        offsets = np.append(0, np.cumsum(np.bincount(chosen, minlength=k)))
        members = csr_array((np.ones(len(order)), order, offsets), shape=(k, len(order)))
        sums += members @ points[part].astype(np.float64)
    return sums


@dataclass(frozen=True)
class PartTask:
    """What one part needs besides the centroids. ``near``, ascending: the clusters open to its points, else all.

    ``before``: their clusters in the assignment that the sums are from. None: sums begin at zero.
    """

    near: NDArray[np.int64] | None = None
    before: NDArray[np.int32] | None = None


def assign_part(
    points: Points, centroids: NDArray[np.float32], task: PartTask
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
    """The cluster of each point, int32 (n,), and the change of sums: which clusters', (m,), and float64 (m, width)."""
    open_clusters = centroids if task.near is None else centroids[task.near]
    search = CentroidSearch(open_clusters, euclidean=not points.spherical, device=points.device)
    clusters = np.empty(len(points), dtype=np.int32)
    for part in points.blocks():
        clusters[part] = search.assign(points.take(part), points.on_device(part))
    if task.near is not None:
        clusters = task.near[clusters].astype(np.int32)
    before = task.before
    moved = np.arange(len(points)) if before is None else np.flatnonzero(clusters != before)
    joined = clusters[moved]
    left = joined[:0] if before is None else before[moved]
    touched, rows = np.unique(np.concatenate((joined, left)), return_inverse=True)
    changes = np.zeros((len(touched), centroids.shape[1]))
    for begin in range(0, len(moved), BLOCK_ROWS):
        part = slice(begin, begin + BLOCK_ROWS)
        block = points.take(moved[part])
        changes += cluster_sums(block, rows[: len(moved)][part], len(touched))
        if before is not None:
            changes -= cluster_sums(block, rows[len(moved) :][part], len(touched))
    return clusters, touched.astype(np.int64), changes


def assign(
    parts: Parts,
    centroids: NDArray[np.float32],
    near: Sequence[NDArray[np.int64]] | None = None,
    before: Assignment | None = None,
) -> Assignment:
    """The assignment step of Lloyd's algorithm; ``near``: the clusters open to the points of each part, else all.

    ``before``: an assignment of the same points, used up. Sums change only by the points that move. This is quicker,
    and gives the same result because sums are exact.
    """
    clusters = [np.empty(0, dtype=np.int32)] * len(parts.points)
    counts = np.zeros(len(centroids), dtype=np.int64)
    sums = np.zeros(centroids.shape) if before is None else before.sums
    tasks = [
        PartTask(None if near is None else near[number], None if before is None else before.clusters[number])
        for number in range(len(parts.points))
    ]
    for number, (found, touched, changes) in parts.map(assign_part, centroids, each=tasks):
        clusters[number] = np.array(found)  # what comes from a worker is read-only
        counts += np.bincount(found, minlength=len(counts))
        sums[touched] += changes
    return Assignment(clusters, sums, counts)


def objective(assignment: Assignment, centroids: NDArray[np.float32], squares: float, *, spherical: bool) -> float:
    """The sum of all points' costs, from the sums alone; ``squares``: the sum of all ``Points.squares``.

    Σ|x - c|² = Σ|x|² - 2·ΣS·c + Σn·|c|² with S and n a cluster's sum and number; spherical: Σ(1 - x·c) = N - ΣS·c.
    """
    products = inner_products(assignment.sums, centroids)
    if spherical:
        return squares - fsum(products)
    lengths = inner_products(centroids, centroids)
    return max(0.0, fsum([squares, *(-2 * products), *(assignment.counts * lengths)]))


def means(sums: NDArray[np.float64], counts: NDArray[np.int64], *, spherical: bool) -> NDArray[np.float32]:
    """The centroids that suit the sums best: means, of spherical points at unit length; float32 (K, width)."""
    if spherical:
        lengths = np.sqrt(inner_products(sums, sums))
        return np.asarray(sums / np.maximum(lengths, np.finfo(np.float64).tiny)[:, None], dtype=np.float32)
    return np.asarray(sums / np.maximum(counts, 1)[:, None], dtype=np.float32)


def lloyd(
    parts: Parts,
    centroids: NDArray[np.float32],
    iterations: int,
    tolerance: float,
    near: Sequence[NDArray[np.int64]] | None = None,
) -> Solution:
    """Lloyd's algorithm from ``centroids`` (K, width); ``near``: the clusters open to the points of each part.

    Stops after ``iterations`` or once the objective falls by no more than ``tolerance`` of itself.
    """
    spherical = parts.points[0].spherical
    squares = fsum(value for _, value in parts.map(Points.squares))
    costs: list[float] = []
    refilled = 0
    assignment = None
    while True:
        assignment = assign(parts, centroids, near, assignment)
        cost = objective(assignment, centroids, squares, spherical=spherical)
        moves = refill_empty(parts, assignment, centroids)
        costs.append(cost - fsum(moved.cost for moved in moves.values()))
        refilled += len(moves)
        if len(costs) > iterations or (len(costs) > 1 and costs[-2] - costs[-1] <= tolerance * costs[-2]):
            break
        centroids = means(assignment.sums, assignment.counts, spherical=spherical)
    centroids = centroids.copy()
    for cluster, moved in moves.items():
        centroids[cluster] = moved.point
    return Solution(centroids, assignment.clusters, tuple(costs), refilled)


def seed_centroids(sample: NDArray[np.float32], k: int, random: np.random.Generator) -> NDArray[np.float32]:
    """``k`` different rows of ``sample`` (n, width), k <= n, drawn by squared distance from those before.

    k-means++ (Arthur & Vassilvitskii 2007) in rounds. Each round draws half as many seeds as exist. So the first are
    drawn one by one, and thousands take some tens of matrix products.
    """
    size = len(sample)
    chosen = [int(random.integers(size))]
    distances = np.full(size, np.inf)
    newest = chosen
    while len(chosen) < k:
        distances = np.minimum(distances, nearest_centroids(sample, sample[newest])[1])
        distances[newest] = 0
        total = distances.sum()
        wanted = min(k - len(chosen), max(1, len(chosen) // SEEDING_GROWTH))
        if total > 0:
            wanted = min(wanted, int(np.count_nonzero(distances)))
            newest = random.choice(size, wanted, replace=False, p=distances / total).tolist()
        else:  # no distinct points left in the sample: these clusters start empty
            newest = np.setdiff1d(np.arange(size), chosen)[:wanted].tolist()
        chosen += newest
    return sample[chosen]


def refill_empty(parts: Parts, assignment: Assignment, centroids: NDArray[np.float32]) -> dict[int, Candidate]:
    """Moves, in place, one point into every empty cluster; returns the points by those clusters.

    Each comes from the cluster that is largest at that moment (the lowest of equals) and is its costliest point (the
    first of equals). If that point sits on its centroid, the next largest gives one. If all do, there are fewer
    distinct points than clusters, and the rest stay empty. The objective never grows.
    """
    empty = np.flatnonzero(assignment.counts == 0).tolist()
    able: dict[int, int] = {}  # what clusters that lack costly points can give
    asked = len(empty)
    while empty:
        donors = _largest_in_turn(assignment.counts, asked, able)
        wanted = Counter(donors)
        found = _costliest(parts, assignment, centroids, wanted)
        able |= {donor: len(found[donor]) for donor in wanted if len(found[donor]) < wanted[donor]}
        chosen = donors[: len(empty)]
        if all(len(found[donor]) >= number for donor, number in Counter(chosen).items()):
            moves = {cluster: found[donor].pop(0) for cluster, donor in zip(empty, chosen, strict=False)}
            for cluster, moved in moves.items():
                assignment.sums[moved.donor] -= moved.point
                assignment.sums[cluster] = moved.point
                assignment.counts[moved.donor] -= 1
                assignment.counts[cluster] = 1
                assignment.clusters[moved.part][moved.place] = cluster
            return moves
        # a look at the points is dear: where many clusters have nothing to give, ever more are asked at once
        asked *= 2
    return {}


def _largest_in_turn(counts: NDArray[np.int64], number: int, able: dict[int, int]) -> list[int]:
    """``number`` times the largest cluster at that moment. It gives a point each time, but never its last.

    Fewer if none can give. Clusters in ``able`` give no more than it says.
    """
    donors: list[int] = []
    heap = [(-count, cluster) for cluster, count in enumerate(counts.tolist()) if count > 1]
    heapq.heapify(heap)
    given: Counter[int] = Counter()
    while heap and len(donors) < number:
        count, cluster = heapq.heappop(heap)
        if given[cluster] == able.get(cluster, number):
            continue
        donors.append(cluster)
        given[cluster] += 1
        if count < -2:
            heapq.heappush(heap, (count + 1, cluster))
    return donors


def _costliest(
    parts: Parts, assignment: Assignment, centroids: NDArray[np.float32], wanted: Counter[int]
) -> dict[int, list[Candidate]]:
    """At most so many points of each cluster in ``wanted``, the costliest first, none that sits on its centroid."""
    found: dict[int, list[Candidate]] = {donor: [] for donor in wanted}
    for number, rows in parts.map(costliest_of_part, centroids, dict(wanted), each=assignment.clusters):
        for donor, cost, place, point in rows:
            found[donor].append(Candidate(donor, cost, number, place, point))
    for donor, candidates in found.items():
        candidates.sort(key=lambda candidate: (-candidate.cost, candidate.part, candidate.place))
        del candidates[wanted[donor] :]
    return found


def costliest_of_part(
    points: Points, centroids: NDArray[np.float32], wanted: dict[int, int], clusters: NDArray[np.int32]
) -> list[tuple[int, float, int, NDArray[np.float32]]]:
    """(cluster, cost, place, point) of the costliest points of one part, at most so many of each cluster."""
    donors = list(wanted)
    members = np.flatnonzero(np.isin(clusters, donors))
    costs = np.empty(len(members), dtype=np.float64)
    for begin in range(0, len(members), BLOCK_ROWS):
        block = members[begin : begin + BLOCK_ROWS]
        costs[begin : begin + BLOCK_ROWS] = points.costs(points.take(block), centroids[clusters[block]])
    costly = np.flatnonzero(costs > points.converged_cost)
    costly = costly[np.lexsort((-costs[costly], clusters[members[costly]]))]  # of equal costs the first comes first
    first = np.searchsorted(clusters[members[costly]], donors)
    last = np.searchsorted(clusters[members[costly]], donors, side="right")
    found = []
    for (donor, number), begin, end in zip(wanted.items(), first.tolist(), last.tolist(), strict=True):
        for row in costly[begin : min(end, begin + number)].tolist():
            place = int(members[row])
            found.append((donor, float(costs[row]), place, points.take(np.array([place]))[0]))
    return found


_SAMPLE = 1 << 12  # points that say where a part is divided
_ITERATIONS = 5
_ROWS_AT_ONCE = 1 << 14


def divide(points: NDArray[np.floating], sizes: NDArray[np.integer], parts: int) -> NDArray[np.int32]:
    """The part of each of K points, int32 (K,). The ``sizes`` (K,) of all parts have nearly the same sum.

    ``points`` (K, d) may be memory-mapped; ``parts`` <= K. A bisection cuts across the line through the two means of a
    sample, where either side gets the size of its parts.
    """
    found = np.zeros(len(points), dtype=np.int32)
    waiting = [(np.arange(len(points)), 0, parts)]
    while waiting:
        chosen, first, number = waiting.pop()
        if number == 1:
            found[chosen] = first
            continue
        left = number // 2
        chosen = chosen[np.argsort(_places_along(points, chosen), kind="stable")]
        sums = np.cumsum(sizes[chosen])
        stop = int(np.searchsorted(sums, sums[-1] * left / number)) + 1
        stop = min(max(stop, left), len(chosen) - (number - left))
        waiting += [(np.sort(chosen[:stop]), first, left), (np.sort(chosen[stop:]), first + left, number - left)]
    return found


def _places_along(points: NDArray[np.floating], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each of the ``chosen`` points lies along the line through the two means of a sample of them, (n,)."""
    sample = np.asarray(points[chosen[:: -(-len(chosen) // _SAMPLE)]], dtype=np.float32)
    two = seed_centroids(sample, 2, np.random.default_rng(0))
    for _ in range(_ITERATIONS):
        nearer, _ = nearest_centroids(sample, two)
        two = means(cluster_sums(sample, nearer, 2), np.bincount(nearer, minlength=2), spherical=False)
    line = (two[1] - two[0])[None]
    places = np.empty(len(chosen))
    for begin in range(0, len(chosen), _ROWS_AT_ONCE):
        block = points[chosen[begin : begin + _ROWS_AT_ONCE]]
        places[begin : begin + _ROWS_AT_ONCE] = inner_products(block, np.broadcast_to(line, block.shape))
    return places
