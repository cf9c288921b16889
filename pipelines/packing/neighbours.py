"""The lists that a greedy tour walks along: for each cluster those near it, and a bound on what isn't listed."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import product_dtype, split

LIST_LENGTH = 96  # what a list holds at most

SAMPLED_LENGTH = 128  # entries above a threshold, on average, before the list is cut to that
SAMPLE_STRIDE = 16  # a threshold is read off the products with every 16th cluster
MOST_FOUND = 8 * LIST_LENGTH  # entries above a threshold that are kept until then
TILE_ROWS, TILE_COLUMNS = 1024, 4096
PRODUCT_ROWS = 2048
NORMS, ONES, THRESHOLD = slice(-7, -4), slice(-4, -1), -1  # columns behind a point's own
STORED = torch.bfloat16
UNIT_ROUNDOFF = torch.finfo(STORED).eps / 2


@dataclass(frozen=True)
class Neighbours:
    """The clusters near each of K centroids.

    ``clusters`` (K, L) int32: nearest first, filled up with the cluster itself. ``nearness`` (K, L) float32: computed
    -|x - y|²/2 in some unit, wrong by at most ``errors[i]`` (K,) float32. Clusters that are not on list i have a true
    nearness of at most ``thresholds[i]`` (K,) float32.
    """

    centroids: NDArray[np.floating]
    clusters: NDArray[np.int32]
    nearness: NDArray[np.float32]
    thresholds: NDArray[np.float32]
    errors: NDArray[np.float32]


@dataclass(frozen=True)
class _Rounded:
    """Centred points in units of a power of two, coarsely rounded, with seven more columns. They are |x|²/2 negative in
    three pieces, three ones, and a one for the threshold."""

    rows: torch.Tensor  # (K, dimension + 7)
    norms: NDArray[np.float64]
    residues: NDArray[np.float64]  # length of each point's rounding error


def find_neighbours(centroids: NDArray[np.floating]) -> Neighbours:
    """Lists the clusters nearest to each of the ``centroids`` (K, dimension), ``LIST_LENGTH`` at most.

    It takes K² · dimension multiplications in blocks, and memory of about K · (4 · dimension + 4000) bytes. The
    centroids must be finite.

    It is one symmetric matrix product at the speed of coarse arithmetic (bfloat16 where the processor multiplies in
    it). Nearness of x and y is -|x - y|²/2, so one triangle of the K × K products serves both sides. Each row carries
    |x|²/2 and its list's threshold in columns of its own. So a product *is* the nearness above the threshold, and the
    list is every positive entry. Only signs are looked at.
    """
    rounded = _round(centroids)
    thresholds = _sampled_thresholds(rounded.rows)
    # Of two clusters the one with the lower threshold decides whether a product is looked at. In this order it's that
    # of the row, all through the triangle right of the diagonal.
    order = np.argsort(thresholds, kind="stable")
    thresholds = thresholds[order]
    rounded = _Rounded(rounded.rows[torch.from_numpy(order)], rounded.norms[order], rounded.residues[order])
    keys, overlong = _keys_above(rounded.rows, thresholds)
    clusters, nearness, cut = _cut(keys, thresholds)
    errors, slack = _errors(rounded, thresholds, np.minimum(clusters.min(axis=1), np.arange(len(order))))
    bounds = np.where(overlong, np.inf, np.maximum(thresholds, cut) + slack)
    places = np.argsort(order, kind="stable")
    return Neighbours(
        centroids,
        order.astype(np.int32)[clusters[places]],
        nearness[places],
        np.nextafter(bounds.astype(np.float32), np.float32(np.inf))[places],
        (1.001 * errors).astype(np.float32)[places],
    )


def _round(centroids: NDArray[np.floating]) -> _Rounded:
    size, dimension = centroids.shape
    dtype = product_dtype()
    rows = torch.ones((size, dimension + 7), dtype=dtype)
    norms, residues = np.empty(size), np.empty(size)
    centre = centroids.mean(axis=0, dtype=np.float64)
    for begin in range(0, size, PRODUCT_ROWS):
        block = slice(begin, begin + PRODUCT_ROWS)
        points = torch.from_numpy(centroids[block] - centre)
        rows[block, :dimension] = points.to(dtype)
        norms[block] = torch.linalg.vector_norm(points, dim=1).numpy()
        residues[block] = torch.linalg.vector_norm(points - rows[block, :dimension], dim=1).numpy()
    unit = float(2.0 ** np.ceil(np.log2(norms.max()))) if norms.max() > 0 else 1.0
    rows[:, :dimension] /= unit  # exact
    norms, residues = norms / unit, residues / unit
    rows[:, NORMS] = split(-np.square(norms) / 2, dtype)
    return _Rounded(rows, norms, residues)


def _left_side(rows: torch.Tensor, thresholds: NDArray[np.float32] | float) -> torch.Tensor:
    """The left side of a product: with it, a row of the right side gives the nearness above the threshold."""
    left = rows.clone()
    left[:, NORMS], left[:, ONES] = rows[:, ONES], rows[:, NORMS]
    left[:, THRESHOLD] = -torch.as_tensor(thresholds)
    return left


def _sampled_thresholds(rows: torch.Tensor) -> NDArray[np.float32]:
    """For each row a nearness that about ``SAMPLED_LENGTH`` others are above; exact in the coarse type."""
    size = len(rows)
    stride = min(SAMPLE_STRIDE, max(1, size // 1024))
    sample = rows[::stride].T.contiguous()
    rank = min(SAMPLED_LENGTH // stride + 1, sample.shape[1])
    thresholds = np.empty(size, dtype=np.float32)
    for begin in range(0, size, PRODUCT_ROWS):
        block = slice(begin, begin + PRODUCT_ROWS)
        nearness = (_left_side(rows[block], 0.0) @ sample).to(STORED)
        thresholds[block] = nearness.topk(rank, dim=1, sorted=False).values.amin(dim=1).float().numpy()
    return thresholds


def _keys_above(rows: torch.Tensor, thresholds: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A key for each cluster above another's threshold, sorted: by row, then by nearness falling, then by column.

    A key has 24 bits of row, 16 bits of the excess over the threshold from high to low, 24 bits of column. Also returns
    the rows, bool (K,), that have ``MOST_FOUND`` or more ((near-)identical centroids). Only some of theirs are
    included.
    """
    counts = np.zeros(len(rows), dtype=np.int64)
    found: list[NDArray[np.int64]] = []
    for top in range(0, len(rows), TILE_ROWS):
        left = _left_side(rows[top : top + TILE_ROWS], thresholds[top : top + TILE_ROWS])
        for begin in range(top, len(rows), TILE_COLUMNS):
            tile = (left @ rows[begin : begin + TILE_COLUMNS].T).to(STORED)
            own, mirrored = _keys_of_tile(tile, top, begin, thresholds)
            for first, keys in ((top, own), (begin, mirrored)):
                numbers = (keys >> 40) - first
                of_tile = np.bincount(numbers)
                counted = counts[first : first + len(of_tile)]
                counted += of_tile
                found.append(keys[counted[numbers] < MOST_FOUND])
    together = torch.from_numpy(np.concatenate(found))
    del found
    return torch.sort(together).values.numpy(), counts >= MOST_FOUND  # all differ; by all threads


def _keys_of_tile(
    tile: torch.Tensor, top: int, begin: int, thresholds: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys of the tile's rows, and of its columns where these lie right of the rows."""
    bits = tile.view(torch.int16).numpy()  # of a positive number, in its order
    positive = np.ascontiguousarray(bits > 0)
    places = _true_places(positive.ravel())
    rows, columns = np.divmod(places, tile.shape[1])
    excess = bits.ravel()[places].astype(np.int64)
    nearness = _as_float(excess) + thresholds[rows + top]
    rows, columns = rows + top, columns + begin
    right = columns >= top + TILE_ROWS
    mirrored = (nearness - thresholds[columns])[right]
    above = mirrored > 0
    sides = (rows, columns, excess), (columns[right][above], rows[right][above], _as_bits(mirrored[above]))
    own, other = ((row << 40) | ((0x7FFF - over) << 24) | column for row, column, over in sides)
    return own, other


def _true_places(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """``np.flatnonzero`` of flags that are seldom set: eight at a time."""
    whole = len(flags) // 8 * 8
    words = np.flatnonzero(flags[:whole].view(np.uint64))
    inside = np.flatnonzero(flags[:whole].reshape(-1, 8)[words])
    places = words[inside >> 3] * 8 + (inside & 7)
    return np.concatenate((places, whole + np.flatnonzero(flags[whole:])))


def _as_float(bits: NDArray[np.int64]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _as_bits(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Upper half of positive numbers, rounded to the nearest and never to zero."""
    rounded: NDArray[np.int64] = (values.view(np.uint32).astype(np.int64) + 0x8000) >> 16
    return np.maximum(rounded, 1, out=rounded)


def _cut(
    keys: NDArray[np.int64], thresholds: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Sorted keys to lists of ``LIST_LENGTH``, and what is the nearest of those cut off, -inf where nothing is."""
    size = len(thresholds)
    starts = np.searchsorted(keys, np.arange(size + 1, dtype=np.int64) << 40)
    counts = np.diff(starts)
    length = max(1, min(LIST_LENGTH, int(counts.max(initial=0))))
    clusters = np.repeat(np.arange(size, dtype=np.int32)[:, None], length, axis=1)
    nearness = np.full((size, length + 1), -np.inf, dtype=np.float32)
    for place in range(length + 1):
        rows = np.flatnonzero(counts > place)
        entries = keys[starts[rows] + place]
        nearness[rows, place] = thresholds[rows] + _as_float(0x7FFF - (entries >> 24 & 0xFFFF))
        if place < length:
            clusters[rows, place] = entries & 0xFFFFFF
    return clusters, nearness[:, :length], nearness[:, length]


def _errors(
    rounded: _Rounded, thresholds: NDArray[np.float32], first: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds, float64 (K,): on the errors of the nearness in each list, and on how far above the threshold, or above
    the nearest that was cut off, the true nearness of what isn't listed may lie. ``first`` (K,): the lowest number of a
    list, its own included.

    Products: with x' and y' the rounded points, |x·y - x'·y'| <= |x - x'|·|y| + |x'|·|y - y'|. Twice the first order of
    a float32 sum of all terms covers the pieces of |x|²/2 and the second order. Only a y within the threshold's
    distance r of x (but for these errors) is listed, or wrongly isn't, so |y| <= |x| + r.

    Storage: the excess of a nearness over the threshold of its row is stored coarsely, and again that over the
    threshold of its column. The row is the one with the lower number, and with the lower threshold; for what isn't
    listed, be it below the threshold or cut off, that is at most four times as deep, as its distance is at most
    r + |x - y| <= 2r.
    """
    norms, residues, depth = rounded.norms, rounded.residues, np.abs(thresholds.astype(np.float64))
    relative = float(np.max(residues / np.maximum(norms, np.finfo(np.float64).tiny)))
    terms = rounded.rows.shape[1] + 9
    largest = np.full(len(norms), norms.max())
    products = np.zeros(len(norms))
    for _ in range(3):
        products = 1.01 * (residues + norms * relative) * largest
        products += terms * 2.0**-23 * ((norms + largest) ** 2 / 2 + depth) + 2.0**-100
        largest = np.minimum(largest, norms + np.sqrt(2 * (depth + products + 4 * UNIT_ROUNDOFF * depth)))
    listed = products + 1.01 * UNIT_ROUNDOFF * (depth[first] + depth)
    return listed, 1.1 * products + 5.3 * UNIT_ROUNDOFF * depth
