"""Empty clusters of k-means get a point each: the costliest of the largest cluster."""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.clustering.parts import Parts
from raytriever.pipelines.clustering.points import BLOCK_ROWS, Points


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
class Move:
    """A point and the empty cluster that it makes its own."""

    cluster: int
    candidate: Candidate


def refill_empty(parts: Parts, assignment: Assignment, centroids: NDArray[np.float32]) -> list[Move]:
    """Moves, in place, one point into every empty cluster; returns the moves.

    Each comes from the cluster that is largest at that moment (the lowest of equals) and is its costliest point (the
    first of equals). Where that point sits on its centroid the next largest gives; where all do, there are fewer
    distinct points than clusters and the rest stay empty. The objective never grows.
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
            moves = [Move(cluster, found[donor].pop(0)) for cluster, donor in zip(empty, chosen, strict=False)]
            for move in moves:
                _apply(assignment, move)
            return moves
        asked *= (
            2  # a look at the points is dear: where many clusters have nothing to give, ever more are asked at once
        )
    return []


def _largest_in_turn(counts: NDArray[np.int64], number: int, able: dict[int, int]) -> list[int]:
    """``number`` times the largest cluster, which gives a point each time but not its last; fewer where none is left.

    Clusters in ``able`` give no more than it says.
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
    members = np.flatnonzero(np.isin(clusters, np.array(list(wanted))))
    costs = np.empty(len(members), dtype=np.float64)
    for begin in range(0, len(members), BLOCK_ROWS):
        block = members[begin : begin + BLOCK_ROWS]
        costs[begin : begin + BLOCK_ROWS] = points.costs(points.take(block), centroids[clusters[block]])
    costly = np.flatnonzero(costs > points.converged_cost)
    costly = costly[np.lexsort((-costs[costly], clusters[members[costly]]))]  # of equal costs the first comes first
    first = np.searchsorted(clusters[members[costly]], np.array([*wanted]))
    last = np.searchsorted(clusters[members[costly]], np.array([*wanted]), side="right")
    found = []
    for (donor, number), begin, end in zip(wanted.items(), first.tolist(), last.tolist(), strict=True):
        for row in costly[begin : min(end, begin + number)].tolist():
            place = int(members[row])
            placed = points.placed(points.take(np.array([place])), centroids[[donor]])
            found.append((donor, float(costs[row]), place, placed[0]))
    return found


def _apply(assignment: Assignment, move: Move) -> None:
    moved = move.candidate
    assignment.sums[moved.donor] -= moved.point
    assignment.sums[move.cluster] = moved.point
    assignment.counts[moved.donor] -= 1
    assignment.counts[move.cluster] = 1
    assignment.clusters[moved.part][moved.place] = move.cluster
