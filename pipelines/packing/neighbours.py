"""The lists that a greedy tour walks along: for every cluster, the clusters near it.

Made once, of use for any number of tours. Up to ``PackingSettings.exact_neighbours_up_to`` clusters the lists are
exact: a bound says what isn't on them. Beyond, where K² products take too long, an HNSW graph finds them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.packing.exact_neighbours import LIST_LENGTH, exact_lists
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.vector_index import build_shard, search_shard, set_search_parameters, train

EXACT_UP_TO = 1 << 18
HNSW = "HNSW32,Flat"
SEARCH = "efSearch=128"
BLOCK_ROWS = 16_384
LISTS = ("clusters", "nearness", "thresholds", "errors")  # the arrays of ``Neighbours`` beside the centroids


@dataclass(frozen=True)
class Neighbours:
    """What is near each of K centroids.

    ``clusters`` (K, L) int32: nearest first, filled up with the cluster itself; ``nearness`` (K, L) float32: computed
    -|x - y|²/2 in some unit, wrong by at most ``errors[i]`` (K,) float32. With ``exact``, the true nearness of whatever
    isn't on list i is at most ``thresholds[i]`` (K,) float32. All arrays may be memory-mapped.
    """

    centroids: NDArray[np.floating]
    exact: bool
    clusters: NDArray[np.int32]
    nearness: NDArray[np.float32]
    thresholds: NDArray[np.float32]
    errors: NDArray[np.float32]


def find_neighbours(centroids: NDArray[np.floating], exact_up_to: int = EXACT_UP_TO) -> Neighbours:
    """Lists the clusters nearest to each of the ``centroids`` (K, dimension), ``LIST_LENGTH`` at most.

    Exact lists take K² · dimension multiplications in blocks, and memory of about K · (4 · dimension + 4000) bytes;
    approximate ones, of more than ``exact_up_to`` clusters, that of the index, K · (4 · dimension + 1000) bytes. Raises
    ``UserError`` for an empty or non-finite array.
    """
    _check(centroids)
    if len(centroids) <= exact_up_to:
        return Neighbours(centroids, True, *exact_lists(centroids))
    return Neighbours(centroids, False, *_approximate_lists(centroids))


def _approximate_lists(
    centroids: NDArray[np.floating],
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Lists by HNSW, thresholds and errors of zero information.

    The index compares by inner product, so the points are lifted to a sphere, twice as wide as they are, on which
    inner products have (but for its slight curvature) the order of distances.
    """
    size = len(centroids)
    centre = centroids.mean(axis=0, dtype=np.float64)
    radius = 2 * (_longest(centroids, centre) or 1.0)

    def lifted(begin: int) -> NDArray[np.float32]:
        points = (centroids[begin : begin + BLOCK_ROWS] - centre) / radius
        height = np.sqrt(1 - np.einsum("ij,ij->i", points, points))
        return np.concatenate((points, height[:, None]), axis=1).astype(np.float32)

    starts = range(0, size, BLOCK_ROWS)
    index = build_shard(map(lifted, starts), HNSW, trained=train(lifted(0), HNSW, seed=0))
    set_search_parameters(index, SEARCH)
    length = min(LIST_LENGTH, size)
    clusters = np.empty((size, length), dtype=np.int32)
    nearness = np.empty((size, length), dtype=np.float32)
    for begin in starts:
        found = search_shard(index, lifted(begin), length)
        part = slice(begin, begin + len(found.rows))
        own = np.arange(begin, begin + len(found.rows))[:, None]
        clusters[part] = np.where(found.rows >= 0, found.rows, own)
        nearness[part] = found.scores - 1
    return clusters, nearness, np.full(size, -np.inf, np.float32), np.zeros(size, np.float32)


def _longest(centroids: NDArray[np.floating], centre: NDArray[np.float64]) -> float:
    blocks = (centroids[begin : begin + BLOCK_ROWS] - centre for begin in range(0, len(centroids), BLOCK_ROWS))
    return max(float(np.sqrt(np.square(block).sum(axis=1).max())) for block in blocks)


def _check(centroids: NDArray[np.floating]) -> None:
    if centroids.ndim != 2 or not len(centroids):
        raise UserError(f"A tour needs centroids of shape (clusters, dimension), clusters > 0; got {centroids.shape}.")
    for begin in range(0, len(centroids), BLOCK_ROWS):
        finite = np.isfinite(centroids[begin : begin + BLOCK_ROWS]).all(axis=1)
        if not finite.all():
            raise UserError(
                f"Centroid {begin + int(np.argmin(finite))} holds a NaN or an infinity: there is no distance to it."
            )
