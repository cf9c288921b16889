"""Asymmetric k-means over (document, query) pairs: which pairs make each other hard.

Contextual Document Embeddings (Morris & Rush 2024, arXiv:2410.02525), section 4.1: groups of pairs with large
similarity between every document and every query of the group (Eq. 2) are sought by k-means over pairs (Eq. 3). Two
readings of Eq. 3:

``midpoint`` (the default): the bound behind Eq. 3 holds where a centroid's document and query are the same vector a.
Then |d - a|² + |q - a|² = 2·|(d + q)/2 - a|² + |d - q|²/2: plain k-means on the mid-points.

``concat`` (the paper's): spherical k-means on both orientations of the normalised concatenation [q; d], a pair's
cluster being that of the unswapped one, as the authors' code has it. Where queries and documents lie apart, some
clusters attract swapped vectors only; they are left out of the result.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.lloyd import (
    ConcatenatedPairs,
    GatheredPoints,
    MidPoints,
    Points,
    Solution,
    lloyd,
    seed_centroids,
)
from raytriever.pipelines.two_levels import lloyd_in_two_levels
from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError

HELD_BYTES = 1 << 28  # points are made once and held where they need no more, else anew in every iteration
Pairs = Literal["midpoint", "concat"]


class KMeansSettings(Settings):
    """How pairs are clustered."""

    pairs: Pairs = "midpoint"
    iterations: int = Field(default=50, ge=1)  # at most; each moves every centroid once
    tolerance: float = Field(default=1e-4, ge=0)  # stop once the objective changes by less than this share
    restarts: int = Field(default=1, ge=1)  # keep the best of so many seeds
    two_level_above: int = Field(default=16384, ge=1)  # clusters; more are sought in √K cells first


@dataclass(frozen=True)
class Clustering:
    """A clustering of N pairs; every one of its clusters has a pair.

    ``assignments``: (N,) int32. ``centroids``: (K, dimension) float32, or (K, 2·dimension) for ``concat``, the query's
    half first. ``objective``: the sum of the costs before the first iteration and after each: squared distances of
    mid-points from centroids, or 1 - cosine of both orientations; it never grows. ``refilled``: empty clusters that
    were given a point, over all iterations. ``left_out``: clusters asked for that no pair fell into.
    """

    assignments: NDArray[np.int32]
    centroids: NDArray[np.float32]
    objective: tuple[float, ...]
    iterations: int
    refilled: int
    left_out: int


def number_of_clusters(n: int, cluster_size: int) -> int:
    """K = ceil(n / cluster_size): ``cluster_size`` is the average size, not a bound."""
    if n < 1 or cluster_size < 1:
        raise UserError(f"{n} pairs in clusters of {cluster_size}: both must be at least 1.")
    return -(-n // cluster_size)


def cluster_pairs(
    documents: NDArray[np.floating], queries: NDArray[np.floating], k: int, settings: KMeansSettings, seed: int
) -> Clustering:
    """Clusters N pairs of vectors into at most ``k`` clusters (of N < k pairs, or fewer distinct ones, fewer).

    ``documents``, ``queries``: (N, dimension) float16 or float32, row i of both is pair i; may be memory-mapped, they
    are read block by block. The result is a function of the arguments alone, whatever the number of threads. Raises
    ``UserError`` where shapes or types don't fit, ``k`` is below 1 or a vector holds NaN or infinity.
    """
    _check(documents, queries, k)
    k = min(k, len(documents))
    points: Points = (MidPoints if settings.pairs == "midpoint" else ConcatenatedPairs)(documents, queries)
    if len(points) * points.take(slice(0, 1)).nbytes <= HELD_BYTES:
        points = GatheredPoints(points, slice(None))
    found: list[Solution] = []
    for restart in range(settings.restarts):
        random = np.random.default_rng((seed, restart))
        if k > settings.two_level_above:
            found.append(lloyd_in_two_levels(points, k, settings.iterations, settings.tolerance, random))
        else:
            seeds = seed_centroids(points, k, random)
            found.append(lloyd(points, seeds, settings.iterations, settings.tolerance))
    best = min(found, key=lambda solution: solution.objective[-1])  # the first of equals
    # of concatenated pairs the unswapped come first
    used, clusters = np.unique(best.assignment.clusters[: len(documents)], return_inverse=True)
    return Clustering(
        clusters.astype(np.int32),
        best.centroids[used],
        best.objective,
        len(best.objective) - 1,
        best.refilled,
        k - len(used),
    )


def _check(documents: NDArray[np.floating], queries: NDArray[np.floating], k: int) -> None:
    if documents.ndim != 2 or documents.shape != queries.shape or 0 in documents.shape:
        raise UserError(
            f"Document vectors of shape {documents.shape} and query vectors of shape {queries.shape} are not pairs:"
            " both must be (pairs, dimension), of one shape, and not empty."
        )
    for side, vectors in (("document", documents), ("query", queries)):
        if vectors.dtype not in (np.float16, np.float32):
            raise UserError(
                f"The {side} vectors are {vectors.dtype}; float16 and float32 can be clustered. Convert them."
            )
    if k < 1:
        raise UserError(f"{k} clusters were asked for; there must be at least 1.")
    for begin in range(0, len(documents), 8192):
        for side, vectors in (("document", documents), ("query", queries)):
            finite = np.isfinite(vectors[begin : begin + 8192]).all(axis=1)
            if not finite.all():
                raise UserError(
                    f"The {side} vector of pair {begin + int(np.argmin(finite))} (counted from 0) holds a NaN or an"
                    " infinity. Embed that text again, or leave the pair out."
                )
