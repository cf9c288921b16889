"""Topic-aware sampling of queries, TAS-B (Hofstätter et al. 2021, arXiv:2104.06967, section 3.2).

Queries are clustered once; every batch is composed of queries of one randomly chosen cluster.
"""

import numpy as np
from numpy.typing import NDArray


def topic_batches(
    clusters: NDArray[np.integer], items: NDArray[np.int64], batch_size: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """``items``, a multiple of ``batch_size``, as batches (batches, batch_size), each item in one.

    ``clusters[item]``: the cluster of each. A cluster's items are shuffled and cut into batches; what is left of each
    is joined with that of other clusters, these in a random order. The batches then go in a random order, so that the
    next one is of a cluster with a probability proportional to the whole batches that the cluster has left.
    """
    shuffled = generator.permutation(items)
    shuffled = shuffled[np.argsort(clusters[shuffled], kind="stable")]
    labels = clusters[shuffled]
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    sizes = np.diff(np.append(starts, len(labels)))
    place = np.arange(len(labels)) - np.repeat(starts, sizes)
    whole = place < np.repeat(sizes // batch_size * batch_size, sizes)
    turn = np.repeat(generator.permutation(len(sizes)), sizes)  # of each cluster's rest among the rests
    rest = shuffled[~whole][np.argsort(turn[~whole], kind="stable")]
    batches = np.concatenate((shuffled[whole], rest)).reshape(-1, batch_size)
    return batches[generator.permutation(len(batches))]
