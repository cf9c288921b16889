"""Points divided into parts of one size, of points near one another: what one task would take too long for."""

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.lloyd import cluster_sums, means, seed_centroids
from pipelines.clustering.nearest_centroids import inner_products, nearest_centroids

_SAMPLE = 1 << 12  # points that say where a part is divided
_ITERATIONS = 5
_BLOCK_ROWS = 1 << 14


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
    for begin in range(0, len(chosen), _BLOCK_ROWS):
        block = points[chosen[begin : begin + _BLOCK_ROWS]]
        places[begin : begin + _BLOCK_ROWS] = inner_products(block, np.broadcast_to(line, block.shape))
    return places
