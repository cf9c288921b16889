"""Regions of a large domain: clusters near one another, packed as a domain of their own.

A greedy tour takes one step after another, so a domain of one tour is one task, however large. Batches hold near
clusters, and swaps go no further than a few batches, so little is lost where two regions meet: docs/benchmarks.md.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.nearest_centroids import inner_products

CLUSTERS_OF_A_REGION = 1 << 15  # about, at most; lists of neighbours cost the square of their number
_SAMPLE = 1 << 12  # clusters that say where a region is divided
_BLOCK_ROWS = 1 << 14


def number_of_regions(pairs: int, clusters: int, region_pairs: int) -> int:
    """Of a domain, so that none has more than ``region_pairs``, about; one where the domain is no larger."""
    return max(1, min(clusters, max(-(-pairs // region_pairs), -(-clusters // CLUSTERS_OF_A_REGION))))


def divide(centroids: NDArray[np.floating], sizes: NDArray[np.integer], regions: int) -> NDArray[np.int32]:
    """The region of each of K clusters, int32 (K,): so many regions, equal in pairs but for a cluster's.

    ``centroids`` (K, d), ``sizes`` (K,): pairs of each; ``regions`` <= K. By bisection: across the line through the two
    means of a sample, where that leaves either side the pairs of its regions.
    """
    found = np.zeros(len(centroids), dtype=np.int32)
    waiting = [(np.arange(len(centroids)), 0, regions)]
    while waiting:
        clusters, first, number = waiting.pop()
        if number == 1:
            found[clusters] = first
            continue
        left = number // 2
        clusters = clusters[np.argsort(_places_along(centroids, clusters), kind="stable")]
        pairs = np.cumsum(sizes[clusters])
        stop = int(np.searchsorted(pairs, pairs[-1] * left / number)) + 1
        stop = min(max(stop, left), len(clusters) - (number - left))
        waiting += [(np.sort(clusters[:stop]), first, left), (np.sort(clusters[stop:]), first + left, number - left)]
    return found


def _places_along(centroids: NDArray[np.floating], clusters: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each of ``clusters`` lies along the line through the two means of a sample of them, (n,)."""
    sample = np.asarray(centroids[clusters[:: -(-len(clusters) // _SAMPLE)]], dtype=np.float32)
    means = cluster_pairs(sample, sample, 2, KMeansSettings(), seed=0).centroids.astype(np.float64)
    line = (means[-1] - means[0])[None]
    places = np.empty(len(clusters))
    for begin in range(0, len(clusters), _BLOCK_ROWS):
        block = centroids[clusters[begin : begin + _BLOCK_ROWS]]
        places[begin : begin + _BLOCK_ROWS] = inner_products(block, np.broadcast_to(line, block.shape))
    return places
