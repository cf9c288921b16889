"""Asymmetric k-means over (query, document) pairs: which pairs make each other hard.

Contextual Document Embeddings (Morris & Rush 2024, arXiv:2410.02525), section 4.1. It wants groups of pairs with large
similarity between every query and every document of the group (Eq. 2). k-means over pairs (Eq. 3) finds them. Two
readings of Eq. 3:

``midpoint`` (the default): the bound behind Eq. 3 holds where a centroid's query and document are the same vector a.
Then |q - a|² + |d - a|² = 2·|(q + d)/2 - a|² + |q - d|²/2: plain k-means on the mid-points.

``concat`` (the paper's): spherical k-means on both orientations of the normalised concatenation [q; d]. A pair's
cluster is that of the unswapped one, as in the authors' code. Where queries and documents lie apart, some clusters
attract swapped vectors only; they are left out of the result.

``sides: queries`` clusters only the queries, for topic-aware sampling (Hofstätter et al. 2021, arXiv:2104.06967).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, isqrt
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveInt

from pipelines.clustering.lloyd import (
    SEEDING_SAMPLE,
    Solution,
    assign,
    cluster_sums,
    divide,
    lloyd,
    means,
    seed_centroids,
)
from pipelines.clustering.nearest_centroids import squared_distances
from pipelines.clustering.pair_vectors import PairVectors, both_orientations
from pipelines.clustering.points import ConcatenatedPairs, Frame, LocalParts, MidPoints, Points, Split, cut
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings

Pairs = Literal["midpoint", "concat"]
KINDS: dict[Pairs, type[Points]] = {"midpoint": MidPoints, "concat": ConcatenatedPairs}
SAMPLE_PER_CELL = 256  # points that each cell's centroid is the mean of, about
LARGEST_CELL = 1.25  # times the average of points in the sample; larger ones are divided
NEAR_CELLS = 8  # a point may join the clusters of this many cells, its own included
REFINEMENTS = 2  # iterations across the borders, at most
SMALLEST_SAMPLE = 1024  # points that seeds are drawn from
LARGEST_COORDINATE = 1e15  # squares and products stay far from float32's end


class KMeansSettings(Settings):
    """How pairs are clustered."""

    sides: Literal["both", "queries"] = "both"
    """both: asymmetric k-means on queries and documents. queries: k-means on the queries' vectors only."""
    pairs: Pairs = "midpoint"
    """How a pair is represented: by the mid-point of its vectors, or by both concatenated."""
    iterations: PositiveInt = 50
    """Most iterations. Each moves every centroid once."""
    tolerance: NonNegativeFloat = 1e-4
    """Stops when the objective changes by less than this share."""
    restarts: PositiveInt = 1
    """Number of seeds to try. The best result is kept."""
    two_level_above: PositiveInt = 4096
    """With more clusters than this, centroids are first searched in √K cells."""

    def _check(self) -> None:
        if self.sides == "queries" and self.pairs != "midpoint":
            raise ValueError(
                f"sides: queries clusters one vector a pair, but pairs: {self.pairs} needs both. Leave it out"
            )


@dataclass(frozen=True)
class Clustering:
    """A clustering of N pairs; every one of its clusters has a pair.

    ``assignments``: (N,) int32. ``centroids``: (K, dimension) float32, or (K, 2·dimension) for ``concat``, the query's
    half first. ``objective``: the sum of the costs before the first iteration and after each. A cost is the squared
    distance of a mid-point from its centroid, or 1 - cosine of both orientations. It never grows. ``refilled``: empty
    clusters that were given a point, over all iterations. ``left_out``: clusters asked for that no pair fell into.
    ``zeros``: pairs with a vector of zeros on either side.
    """

    assignments: NDArray[np.int32]
    centroids: NDArray[np.float32]
    objective: tuple[float, ...]
    refilled: int
    left_out: int
    zeros: int


def number_of_clusters(n: int, cluster_size: int) -> int:
    """K = ceil(n / cluster_size): ``cluster_size`` is the average size, not a bound."""
    if n < 1 or cluster_size < 1:
        raise UserError(f"{n} pairs in clusters of {cluster_size}: both must be at least 1.")
    return -(-n // cluster_size)


def cluster_pairs(
    pairs: PairVectors,
    k: int,
    settings: KMeansSettings,
    seed: int,
    split: Split = LocalParts,
    device: str = "cpu",
    name_of: Callable[[int], str] = "pair {} (counted from 0)".format,
) -> Clustering:
    """Clusters N pairs into at most ``k`` clusters (of N < k pairs, or fewer distinct ones, fewer).

    Parts are read block by block where ``split`` puts them; only a sample is read here. The result is a function of
    pairs, ``k``, settings and seed alone, whatever the number of threads, the ``split`` and the ``device``. Where
    ``settings.sides`` is queries, ``pairs`` must have them on both sides. ``name_of``: what errors call a pair. Raises
    ``UserError`` where ``k`` is below 1 or a vector holds NaN or infinity.
    """
    if k < 1:
        raise UserError(f"{k} clusters were asked for. There must be at least 1.")
    k = min(k, len(pairs))
    largest, zeros = _examine_all(pairs, split, name_of)
    kind = KINDS[settings.pairs]
    oriented = both_orientations(pairs) if settings.pairs == "concat" else pairs
    two_levels = k > settings.two_level_above
    size = min(len(oriented), max(SMALLEST_SAMPLE, SAMPLE_PER_CELL * isqrt(k) if two_levels else SEEDING_SAMPLE * k))
    chosen = np.sort(np.random.default_rng(seed).choice(len(oriented), size, replace=False))
    raw = kind(oriented.subset(chosen)).take(slice(None))
    centre = None if kind.spherical else raw.mean(axis=0, dtype=np.float64).astype(np.float32)
    frame = Frame.around(centre, 1.0 if kind.spherical else 2 * largest, len(oriented))
    points = kind(oriented, frame, device)
    sample = points.subset(chosen)
    parts = None if two_levels else split(cut(points))
    found: list[Solution] = []
    for restart in range(settings.restarts):
        if parts is None:
            found.append(lloyd_in_two_levels(points, split, sample, k, settings, (seed, restart)))
        else:
            seeds = seed_centroids(sample.take(slice(None)), k, np.random.default_rng((seed, restart)))
            found.append(lloyd(parts, seeds, settings.iterations, settings.tolerance))
    best = min(found, key=lambda solution: solution.objective[-1])  # the first of equals
    # of concatenated pairs the unswapped come first
    used, clusters = np.unique(np.concatenate(best.clusters)[: len(pairs)], return_inverse=True)
    centroids = best.centroids[used] if centre is None else best.centroids[used] + centre
    return Clustering(clusters.astype(np.int32), centroids, best.objective, best.refilled, k - len(used), zeros)


def lloyd_in_two_levels(
    points: Points, split: Split, sample: Points, k: int, settings: KMeansSettings, seed: Sequence[int]
) -> Solution:
    """At most ``k`` clusters of ``points``: √K cells first, clusters within each, then refinement across their borders.

    Cells are those of a sample; within them points are compared with the cell's own clusters alone. Then every point is
    compared, a few times over, with the clusters of the few cells nearest to its own. So an iteration takes about N·√K
    distances in place of N·K, which grows with the square of N where the average cluster size is given. ``clusters`` of
    the solution is one array, of all.

    ``split`` makes parts of descriptions, ``sample`` are some of the points. ``settings`` hold for the cells and within
    each; the objective is that of the refinement. Memory: also the points of the largest cell, where it is clustered.
    """
    random = np.random.default_rng(seed)
    seeds = seed_centroids(sample.take(slice(None)), isqrt(k), random)
    coarse = lloyd(split(cut(sample)), seeds, settings.iterations, settings.tolerance)
    coarse_centroids = split_large_cells(coarse, sample)
    used, cells = np.unique(np.concatenate(assign(split(cut(points)), coarse_centroids).clusters), return_inverse=True)
    members = np.split(np.argsort(cells, kind="stable"), np.cumsum(np.bincount(cells))[:-1])
    shares = apportion(k, np.array([len(places) for places in members]))

    in_cells = split([points.subset(places) for places in members])
    each = [(share, (*seed, number)) for number, share in enumerate(shares.tolist())]
    by_cell = dict(in_cells.map(cluster_cell, settings, each=each))
    fine = [by_cell[number] for number in range(len(members))]
    near = _clusters_nearby(coarse_centroids[used], [len(centroids) for centroids, _ in fine])
    centroids = np.concatenate([centroids for centroids, _ in fine])
    refined = lloyd(in_cells, centroids, min(settings.iterations, REFINEMENTS), settings.tolerance, near)
    clusters = np.empty(len(points), dtype=np.int32)
    for places, found_clusters in zip(members, refined.clusters, strict=True):
        clusters[places] = found_clusters
    refilled = coarse.refilled + sum(moves for _, moves in fine) + refined.refilled
    return Solution(refined.centroids, [clusters], refined.objective, refilled)


def split_large_cells(coarse: Solution, sample: Points) -> NDArray[np.float32]:
    """Centroids of cells, float32 (cells, width). Larger cells are divided, by their points of the ``sample``.

    A cell is a task, and its work grows with the square of its points. So all tasks would wait for the largest.
    """
    labels, cells = np.concatenate(coarse.clusters), len(coarse.centroids)
    sizes = np.bincount(labels, minlength=cells)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    centroids = [coarse.centroids.copy()]
    for cell in np.flatnonzero(sizes > LARGEST_CELL * len(sample) / cells).tolist():
        points = sample.take(members[cell])
        parts = ceil(sizes[cell] * cells / (LARGEST_CELL * len(sample)))
        part_of = divide(points, np.ones(len(points), dtype=int), parts)
        found = means(cluster_sums(points, part_of, parts), np.bincount(part_of), spherical=sample.spherical)
        centroids[0][cell] = found[0]
        centroids.append(found[1:])
    return np.concatenate(centroids)


def cluster_cell(
    cell: Points, settings: KMeansSettings, share_and_seed: tuple[int, Sequence[int]]
) -> tuple[NDArray[np.float32], int]:
    """Clusters one cell's points alone: centroids float32 (share, width) and how many clusters were refilled."""
    share, seed = share_and_seed
    random = np.random.default_rng(seed)
    whole = LocalParts([cell if cell.keep else cell.subset(slice(None))])  # else its points are given up afterwards
    chosen = random.choice(len(cell), min(len(cell), SEEDING_SAMPLE * share), replace=False)
    seeds = seed_centroids(whole.points[0].take(np.sort(chosen)), share, random)
    found = lloyd(whole, seeds, settings.iterations, settings.tolerance)
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
    numbers = [np.arange(first, last) for first, last in pairwise(accumulate(shares, initial=0))]
    nearby = []
    for cell in cells:
        nearest = np.sort(np.argsort(squared_distances(cells, cell), kind="stable")[:NEAR_CELLS])
        nearby.append(np.concatenate([numbers[int(near)] for near in nearest]))
    return nearby


def examine(points: Points) -> tuple[float, int, tuple[int, str] | None]:
    """The largest coordinate of a part's vectors, how many pairs have a zero vector, the first bad place and side."""
    largest, zeros = 0.0, 0
    for part in points.blocks():
        is_zero = np.zeros(part.stop - part.start, dtype=bool)
        for side, vectors in zip(("query", "document"), points.pairs.take(part), strict=True):
            numbers = np.asarray(vectors, dtype=np.float32)
            lengths = np.maximum(numbers.max(axis=1), -numbers.min(axis=1)).astype(np.float64)
            good = lengths <= LARGEST_COORDINATE  # False for NaN
            if not good.all():
                return largest, zeros, (part.start + int(np.argmin(good)), side)
            largest = max(largest, float(lengths.max()))
            is_zero |= lengths == 0
        zeros += int(is_zero.sum())
    return largest, zeros, None


def _examine_all(pairs: PairVectors, split: Split, name_of: Callable[[int], str]) -> tuple[float, int]:
    """Raises ``UserError`` that names the first pair with vectors that can't be clustered."""
    parts = split(cut(MidPoints(pairs)))
    found = dict(parts.map(examine))
    begin = 0
    for number, part in enumerate(parts.points):
        bad = found[number][2]
        if bad is not None:
            raise UserError(
                f"The {bad[1]} vector of {name_of(begin + bad[0])} holds a NaN, an infinity or a number beyond"
                f" {LARGEST_COORDINATE:g}. Embed that text again, or leave the pair out."
            )
        begin += len(part)
    return max(largest for largest, _, _ in found.values()), sum(zeros for _, zeros, _ in found.values())


CLUSTERS = "clusters"


@dataclass(frozen=True)
class DomainPairs:
    """Pairs of a domain that are packed together.

    ``pairs`` int64 (n,): numbers in the pairs artifact. ``clusters`` int32 (n,): of each pair. ``centroids`` (K, d).
    """

    pairs: NDArray[np.int64]
    clusters: NDArray[np.int32]
    centroids: NDArray[np.float32]


def read_domain(artifact: Artifact, number: int) -> DomainPairs:
    """One domain of a clusters artifact."""
    table = pq.read_table(artifact.path(artifact.shards[number].files[0].name))
    return DomainPairs(table["pair"].to_numpy(), table["cluster"].to_numpy(), read_centroids(artifact, number))


def read_centroids(artifact: Artifact, number: int) -> NDArray[np.float32]:
    """The centroids of one domain, memory-mapped."""
    return np.asarray(np.load(artifact.path(artifact.shards[number].files[1].name), mmap_mode="r"))
