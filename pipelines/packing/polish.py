"""Swap polish: a local search on Eq. 2 of Contextual Document Embeddings at fixed batch sizes.

Morris & Rush 2024, section 4.1, Eq. 2: a batch is as hard as the sum of d_i·q_j + d_j·q_i over its pairs. Let the
affinity be G_ij = d_i·q_j + d_j·q_i, and A_ib the sum of G_ij over the members j of batch b. Exchanging x of batch a
for y of batch b changes half that sum by

A_xb - A_xa + A_ya - A_yb + G_xx + G_yy - 2·G_xy.

A negative that eq. 4 masks is not counted: where d_i·q_j is at least d_j·q_j it is 0. Otherwise swaps would gather
pairs of one document, for example, and a filter would then mask them.

Only batches near on the tour exchange items: a window of consecutive batches is polished on its own. Windows are
independent, so many go through the same steps together, and groups of windows run in parallel.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

WINDOW_BATCHES = 8  # neighbours on the tour that exchange items
WINDOW_ITEMS = 2048  # unless these are more items: then fewer batches, two at least
CELLS_AT_ONCE = 1 << 24  # affinities of the windows that go together: 64 MiB
SMALLEST_GAIN = 1e-3 * 2**23  # of the longest vectors' product; less isn't worth a swap

# item numbers (n,) to the query and the document vectors (n, d) of these items
VectorsOf = Callable[[NDArray[np.int64]], tuple[NDArray[np.floating], NDArray[np.floating]]]


def polish_batches(batches: NDArray[np.int64], vectors: VectorsOf, sweeps: int) -> NDArray[np.int64]:
    """Exchanges items between batches near one another in the list while Eq. 2 grows, ``sweeps`` times through.

    ``batches`` (batches, B): item numbers that ``vectors`` knows. The sum never falls; the items of the whole and the
    batch sizes stay. A sweep offers every place its best exchange within a window of batches. The next sweep's windows
    straddle the borders of these. The result doesn't depend on the number of threads (torch's). Memory of a thread is
    12 bytes times ``CELLS_AT_ONCE``, or times the square of a window's items if that is more, and a window's vectors.
    """
    batches = batches.copy()
    count, size = batches.shape
    span = max(2, min(WINDOW_BATCHES, WINDOW_ITEMS // size))
    together = max(1, CELLS_AT_ONCE // (span * size) ** 2)
    swaps: list[int] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for sweep in range(sweeps):
            first = span // 2 if sweep % 2 else 0
            whole = first + (count - first) // span * span if count > first else first
            runs = [(begin, min(begin + together * span, whole)) for begin in range(first, whole, together * span)]
            edges = [(begin, end) for begin, end in ((0, min(first, count)), (whole, count)) if begin < end]
            windows = [batches[begin:end].reshape(-1, span, size) for begin, end in runs]
            windows += [batches[None, begin:end] for begin, end in edges]
            swaps.append(sum(pool.map(lambda window: _polish_windows(window, vectors), windows)))
            if swaps[-2:] == [0, 0]:
                break
    return batches


def affinities(*, queries: NDArray[np.floating], documents: NDArray[np.floating]) -> NDArray[np.float32]:
    """G_ij = d_i·q_j + d_j·q_i, float32 (n, n), in a unit of these vectors; d_i·q_j >= d_j·q_j counts 0.

    The vectors are rounded to whole multiples of so small a length that no sum of products goes beyond 2²³ (by
    Cauchy-Schwarz). float32 holds all of them exactly. So the result does not depend on the order of additions, hence
    not on threads. For vectors of length 1 a product is off by about 10⁻⁴.
    """
    sides = [queries.astype(np.float64), documents.astype(np.float64)]
    longest = max(float(np.sqrt(np.einsum("ij,ij->i", side, side).max())) for side in sides)
    scale = (2.0**11.5 - np.sqrt(documents.shape[1]) / 2 - 1) / (longest or 1.0)
    of_queries, of_documents = (torch.from_numpy(np.rint(side * scale).astype(np.float32)) for side in sides)
    products = of_documents @ of_queries.T
    own = products.diagonal().clone()
    products[products >= own] = 0
    products.diagonal().copy_(own)
    return (products + products.T).numpy()


def _polish_windows(windows: NDArray[np.int64], vectors: VectorsOf) -> int:
    """Polishes ``windows`` (W, batches, B) in place, each alone; the number of exchanges."""
    number, count, size = windows.shape
    items = windows.reshape(number, count * size)
    affinity = np.empty((number, count * size, count * size), dtype=np.float32)
    for window, of_window in enumerate(items):
        queries, documents = vectors(of_window)
        affinity[window] = affinities(queries=queries, documents=documents)
    state, swaps = _Windows(affinity, count, size), 0
    for place in range(count * size):
        chosen, partners = state.best_exchanges(place)
        if len(chosen):
            state.exchange(chosen, place, partners)
            swaps += len(chosen)
    items[:] = np.take_along_axis(items, state.order, axis=1)
    return swaps


class _Windows:
    """The item of each window in each place; place p is in batch p // B.

    ``affinity`` (W, n, n) of the items. ``order`` (W, n): the item in each place. ``to_batch`` (W, batches, n): A of
    the item in each place. ``leaving`` (W, n): what batch b gains without the item y there, G_yy - A_yb.
    """

    def __init__(self, affinity: NDArray[np.float32], count: int, size: int) -> None:
        number = len(affinity)
        self._affinity, self._count, self._size = affinity, count, size
        self._windows = np.arange(number)
        self._own = affinity.diagonal(axis1=1, axis2=2).astype(np.float64)
        self.order = np.repeat(np.arange(count * size)[None], number, axis=0)
        by_batch = affinity.reshape(number, count, size, -1)
        self._to_batch = by_batch.sum(axis=2, dtype=np.float64)
        self.leaving = np.empty((number, count * size))
        for batch in range(count):
            self._leave(self._windows, np.full(number, batch))

    def _leave(self, windows: NDArray[np.integer], batches: NDArray[np.integer]) -> None:
        places = batches[:, None] * self._size + np.arange(self._size)
        rows = windows[:, None]
        own = self._own[rows, self.order[rows, places]]
        self.leaving[rows, places] = own - self._to_batch[rows, batches[:, None], places]

    def _affinities(self, windows: NDArray[np.integer], places: NDArray[np.integer] | int) -> NDArray[np.float32]:
        """Affinities of the items in these ``places`` with those in every place of their window."""
        rows = self._affinity[windows, self.order[windows, places]]
        return np.take_along_axis(rows, self.order[windows], axis=1)

    def best_exchanges(self, place: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Windows with a worthwhile exchange of the item at ``place``, and the place of its best partner."""
        batch = place // self._size
        gains = self._to_batch[:, batch] + self.leaving
        gains -= 2 * self._affinities(self._windows, place)
        by_batch = gains.reshape(-1, self._count, self._size)
        by_batch += self._to_batch[:, :, place, None]
        by_batch[:, batch] = -np.inf
        partners = gains.argmax(axis=1)
        best = gains[self._windows, partners] + self.leaving[:, place]
        chosen = np.flatnonzero(best > SMALLEST_GAIN)
        return chosen, partners[chosen]

    def exchange(self, windows: NDArray[np.integer], place: int, partners: NDArray[np.integer]) -> None:
        """Exchanges the items at ``place`` and at ``partners`` (one in each of ``windows``)."""
        own, others = np.full(len(windows), place // self._size), partners // self._size
        change = self._affinities(windows, partners).astype(np.float64) - self._affinities(windows, place)
        self._to_batch[windows, own] += change
        self._to_batch[windows, others] -= change
        for array in (self._to_batch.swapaxes(1, 2), self.order):
            first, second = array[windows, place], array[windows, partners]
            array[windows, place], array[windows, partners] = second, first
        self._leave(windows, own)
        self._leave(windows, others)
