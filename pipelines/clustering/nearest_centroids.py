"""Exact assignment of points to centroids at the speed of a coarse matrix product.

The products may be rounded coarsely (bfloat16 where the processor multiplies in it). An error bound tells which
centroids could be a point's best; where there are several, they are compared in float64. So the assignment is that of
float64 arithmetic, the lowest index on ties, on any processor or GPU and any number of threads.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError

if TYPE_CHECKING:
    import torch

PRODUCTS_AT_ONCE, PRODUCTS_ON_GPU = 1 << 20, 1 << 26
PAIRS_AT_ONCE = 1 << 12
CACHED_ROWS = 128  # float64 copies of this many rows stay in the processor's cache
_LONGER = 1.0001  # a length computed in float32 times this is no less than the length
_HALF_COLUMNS = 3  # rounded numbers that sum to a half squared length


class CentroidSearch:
    """Centroids (K, dimension) float32, made ready for finding each point's best.

    ``euclidean``: the best is the nearest; its score is x·c - |c|²/2 = (|x|² - |x - c|²)/2. Otherwise it is the one
    with the largest inner product. ``device``: of the coarse products, 'cpu' or 'cuda'. The closer points and
    centroids are to the origin, the fewer centroids have to be compared in float64.
    """

    def __init__(self, centroids: NDArray[np.float32], *, euclidean: bool, device: str = "cpu") -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "A GPU was asked for, but torch finds none here. Install a torch built for CUDA, or set"
                " resources.gpus_per_worker to 0."
            )
        self.centroids = centroids
        self._euclidean = euclidean
        # a GPU may sum bfloat16 products in bfloat16, which the bound below doesn't allow for
        self._dtype = product_dtype() if device == "cpu" else torch.float32
        self._device = device
        exact = torch.from_numpy(centroids)
        rounded = exact.to(self._dtype)
        squares = inner_products(centroids, centroids)
        halves = squares / 2 if euclidean else np.zeros(len(centroids))
        # -|c|²/2 as the products of three more columns with ones: added before the result is rounded
        columns = split(-halves, self._dtype)
        self._right = torch.cat((rounded, columns), dim=1).T.to(device)
        self._longest = float(np.sqrt(squares.max()))
        self._rounding = _LONGER * float(torch.linalg.vector_norm(exact - rounded.float(), dim=1).max())
        self._largest_half = float(halves.max())

    def assign(self, points: NDArray[np.float32], held: "torch.Tensor | None" = None) -> NDArray[np.int32]:
        """The best centroid of each of ``points`` (n, dimension), int32 (n,); ``held``: those on the device already."""
        import torch

        assignments = np.empty(len(points), dtype=np.int32)
        held = torch.from_numpy(points).to(self._device) if held is None else held
        most, at_once = (2048, PRODUCTS_AT_ONCE) if self._device == "cpu" else (1 << 17, PRODUCTS_ON_GPU)
        rows = min(most, max(128, at_once // len(self.centroids)))
        left = held.new_ones((min(rows, len(points)), self._right.shape[0]), dtype=self._dtype)
        for begin in range(0, len(points), rows):
            part = slice(begin, min(begin + rows, len(points)))
            self._assign_block(points[part], held[part], left[: part.stop - begin], assignments[part])
        return assignments

    def _assign_block(
        self, points: NDArray[np.float32], exact: "torch.Tensor", left: "torch.Tensor", assignments: NDArray[np.int32]
    ) -> None:
        """Fills ``assignments``; ``left`` (n, dimension and more columns of ones) is room for the rounded points."""
        import torch

        left[:, : points.shape[1]] = exact
        scores = (left @ self._right).float()
        best, second, best_score = _best_two(scores)
        assignments[:] = best
        lengths = torch.linalg.vector_norm(exact, dim=1).cpu().numpy() * _LONGER
        share = torch.finfo(self._dtype).eps / 2
        open_rows = np.flatnonzero(second >= self._lowest_score(best_score, lengths, share * lengths))
        if not len(open_rows):
            return
        # a closer look: what rounding really took from these points
        chosen = torch.from_numpy(open_rows).to(self._device)
        lost = exact[chosen] - left[chosen, : points.shape[1]].float()
        lost_lengths = torch.linalg.vector_norm(lost, dim=1).cpu().numpy() * _LONGER
        lowest = self._lowest_score(best_score[open_rows], lengths[open_rows], lost_lengths)
        is_open = second[open_rows] >= lowest
        open_rows, lowest = open_rows[is_open], lowest[is_open]
        if len(open_rows):
            candidates = scores[torch.from_numpy(open_rows).to(self._device)].cpu().numpy() >= lowest[:, None]
            candidates[np.arange(len(open_rows)), best[open_rows]] = True
            assignments[open_rows] = self._resolve(points, open_rows, candidates)

    def _lowest_score(
        self, best: NDArray[np.float32], lengths: NDArray[np.float32], rounding: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The lowest computed score, float32 (n,), that the truly best centroid of each point may have.

        ``best``: the points' highest computed scores. ``rounding``: bounds on |x - x'|, with x' the rounded point. A
        score s has three errors. The rounding of point and centroid gives at most |x - x'|·|c| + |x'|·|c - c'|. The
        float32 sum and the result add theirs, the latter a share of s.
        """
        import torch

        rounded = lengths + rounding
        sums = (self.centroids.shape[1] + 8) * 2.0**-23
        error = rounding * self._longest + rounded * self._rounding
        error += sums * (rounded * (self._longest + self._rounding) + self._largest_half)
        share = torch.finfo(self._dtype).eps / 2
        lowest = best - share * np.abs(best.astype(np.float64)) - 2 * error.astype(np.float64)
        lowest /= np.where(lowest >= 0, 1 + share, 1 - share)
        return np.nextafter(lowest.astype(np.float32), np.float32(-np.inf))

    def _resolve(
        self, points: NDArray[np.float32], open_rows: NDArray[np.int64], candidates: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """For each open row the candidate of the lowest float64 cost, the lowest index on ties."""
        rows, columns = np.nonzero(candidates)
        exact = np.empty(len(rows), dtype=np.float64)
        cost, sign = (squared_distances, 1) if self._euclidean else (inner_products, -1)
        for begin in range(0, len(rows), PAIRS_AT_ONCE):
            part = slice(begin, begin + PAIRS_AT_ONCE)
            exact[part] = sign * cost(points[open_rows[rows[part]]], self.centroids[columns[part]])
        order = np.lexsort((columns, exact, rows))
        first = np.searchsorted(rows, np.arange(len(open_rows)))  # rows ascend, so each keeps its stretch
        resolved: NDArray[np.int64] = columns[order[first]]
        return resolved


def nearest_centroids(
    points: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The centroid at the smallest Euclidean distance from each point, and that distance squared.

    ``points`` (n, dimension), ``centroids`` (K, dimension), finite. Returns (n,) int32 and (n,) float64.
    """
    assignments = CentroidSearch(centroids, euclidean=True).assign(points)
    return assignments, squared_distances(points, centroids[assignments])


def squared_distances(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """|left - right|² row by row, float64; no BLAS, so it does not depend on threads. ``right`` may be one row."""
    right = np.broadcast_to(right, left.shape)
    squares = np.empty(len(left), dtype=np.float64)
    for begin in range(0, len(left), CACHED_ROWS):
        part = slice(begin, begin + CACHED_ROWS)
        difference = left[part].astype(np.float64)
        difference -= right[part]
        squares[part] = np.einsum("ij,ij->i", difference, difference)
    return squares


def inner_products(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """left·right row by row, float64; no BLAS, so it does not depend on threads."""
    products = np.empty(len(left), dtype=np.float64)
    for begin in range(0, len(left), CACHED_ROWS):
        part = slice(begin, begin + CACHED_ROWS)
        products[part] = np.einsum("ij,ij->i", left[part].astype(np.float64), right[part].astype(np.float64))
    return products


def product_dtype() -> "torch.dtype":
    """bfloat16 where this processor has instructions for it (several times faster than float32)."""
    import torch

    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


def _best_two(scores: "torch.Tensor") -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """For each row the place of the highest score, the second highest score (-inf if there is none), the highest."""
    import torch

    # on the processor NumPy's argmax is several times faster than torch's
    best = scores.numpy().argmax(axis=1) if scores.device.type == "cpu" else scores.argmax(dim=1).cpu().numpy()
    place = torch.from_numpy(best).to(scores.device)[:, None]
    highest = scores.gather(1, place)
    scores.scatter_(1, place, -torch.inf)
    return best, scores.amax(dim=1).cpu().numpy(), highest[:, 0].cpu().numpy()


def split(numbers: NDArray[np.float64], dtype: "torch.dtype") -> "torch.Tensor":
    """``numbers`` (n,) as sums of numbers of a coarser type, (n, 3): exact to the 24 bits of float32."""
    import torch

    columns = []
    for _ in range(_HALF_COLUMNS):
        columns.append(torch.from_numpy(numbers).to(dtype))
        numbers = numbers - columns[-1].to(torch.float64).numpy()
    return torch.stack(columns, dim=1)
