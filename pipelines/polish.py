"""Swap polish: a local search on Eq. 2 of Contextual Document Embeddings at fixed batch sizes.

Morris & Rush 2024, section 4.1, Eq. 2: a batch is as hard as the sum of d_i·q_j + d_j·q_i over its pairs. With the
affinity G_ij = d_i·q_j + d_j·q_i and A_ib the sum of G_ij over the members j of batch b, exchanging x of batch a for
y of batch b changes half that sum by

    A_xb - A_xa + A_ya - A_yb + G_xx + G_yy - 2·G_xy.
"""

import numpy as np
from numpy.typing import NDArray

WINDOW_BATCHES = 8  # neighbours on the tour that exchange items
WINDOW_ITEMS = 2048  # unless these are more items: then fewer batches, two at least
GRID_BITS = 20
SMALLEST_GAIN = 1e-3  # in units of the affinities; less isn't worth a swap


def polish_batches(
    batches: NDArray[np.int64], documents: NDArray[np.floating], queries: NDArray[np.floating], sweeps: int
) -> NDArray[np.int64]:
    """Exchanges items between batches near one another in the list while Eq. 2 grows, ``sweeps`` times through.

    ``batches`` (batches, B): item numbers into ``documents`` and ``queries`` (N, d), which may be memory-mapped. The
    sum of Eq. 2 never falls; the items of the whole and the batch sizes stay. A sweep offers every item its best
    exchange within a window of batches, and the next sweep's windows straddle the borders of these. Memory: 24 bytes
    times the square of ``WINDOW_ITEMS`` or of two batches, whichever is more.
    """
    batches = batches.copy()
    span = max(2, min(WINDOW_BATCHES, WINDOW_ITEMS // batches.shape[1]))
    idle = 0
    for sweep in range(sweeps):
        first = -(span // 2) if sweep % 2 else 0
        swaps = 0
        for begin in range(first, len(batches), span):
            window = batches[max(begin, 0) : begin + span]
            if len(window) > 1:
                swaps += _polish_window(window, documents, queries)
        idle = idle + 1 if not swaps else 0
        if idle == 2:
            break
    return batches


def affinities(documents: NDArray[np.floating], queries: NDArray[np.floating]) -> NDArray[np.float64]:
    """G_ij = d_i·q_j + d_j·q_i, float64 (n, n), divided by the square of a power of two that no length exceeds.

    The vectors are rounded to multiples of 2⁻²⁰ of that power, so that float64 holds every product and sum exactly: the
    result does not depend on the order of additions, hence not on threads.
    """
    sides = [documents.astype(np.float64), queries.astype(np.float64)]
    longest = max(float(np.sqrt(np.einsum("ij,ij->i", side, side).max())) for side in sides)
    unit = 2.0 ** np.ceil(np.log2(longest)) if longest > 0 else 1.0
    left, right = (np.rint(side * (2.0**GRID_BITS / unit)) * 2.0**-GRID_BITS for side in sides)
    products = left @ right.T
    symmetric: NDArray[np.float64] = products + products.T
    return symmetric


def _polish_window(window: NDArray[np.int64], documents: NDArray[np.floating], queries: NDArray[np.floating]) -> int:
    """Offers each item of ``window`` (batches, B) its best exchange; changes it in place, returns the exchanges."""
    count, size = window.shape
    items = window.ravel()
    affinity = affinities(documents[items], queries[items])
    own = affinity.diagonal()
    batch_of = np.repeat(np.arange(count), size)
    place_of = np.arange(len(items))
    to_batch = np.ascontiguousarray(affinity.reshape(len(items), count, size).sum(axis=2).T)  # A, (batches, items)
    leaving = own - to_batch[batch_of, place_of]  # what an item's batch gains by its leaving
    swaps = 0
    for x in range(len(items)):
        a = batch_of[x]
        gains = to_batch[:, x][batch_of]
        gains += to_batch[a]
        gains += leaving
        gains -= 2 * affinity[x]
        gains[batch_of == a] = -np.inf
        y = int(gains.argmax())
        if gains[y] + leaving[x] <= SMALLEST_GAIN:
            continue
        b = batch_of[y]
        change = affinity[y] - affinity[x]
        to_batch[a] += change
        to_batch[b] -= change
        batch_of[x], batch_of[y] = b, a
        place_of[x], place_of[y] = place_of[y], place_of[x]
        leaving = own - to_batch[batch_of, np.arange(len(items))]
        swaps += 1
    window.flat[place_of] = items.copy()
    return swaps
