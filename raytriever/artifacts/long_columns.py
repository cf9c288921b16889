"""Columns of more than 2 GiB of text. Arrow's strings have 32-bit offsets, so such a column has several chunks.

Functions that join a column's chunks (``combine_chunks``, ``take``) overflow there. The functions here don't.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_ROWS_AT_ONCE = 1 << 18  # of a chunk that is made: ids and names are far shorter than 8 KiB on average


def joined(chunks: Iterable[pa.Array]) -> pa.ChunkedArray:
    """Strings as a column of as few chunks as hold them, one of less than 2 GiB: how they were cut changes no file."""
    return pa.table({"": pa.chunked_array(list(chunks), pa.string())}).combine_chunks().column(0)


def take_texts(column: pa.ChunkedArray, rows: NDArray[np.int64]) -> pa.ChunkedArray:
    """The strings in these rows, in their order; each chunk is read where it is."""
    starts = np.cumsum([0, *map(len, column.chunks)])
    blocks = (rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE))
    return pa.chunked_array([_take_block(column.chunks, starts, block) for block in blocks], column.type)


def _take_block(chunks: Sequence[pa.Array], starts: NDArray[np.int64], rows: NDArray[np.int64]) -> pa.Array:
    if len(chunks) == 1:
        return chunks[0].take(pa.array(rows))
    order = np.argsort(rows)
    ascending = rows[order]
    bounds = pairwise(np.searchsorted(ascending, starts).tolist())
    taken = [
        chunk.take(pa.array(ascending[begin:end] - start))
        for chunk, start, (begin, end) in zip(chunks, starts[:-1], bounds, strict=True)
        if begin < end
    ]
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return pa.concat_arrays(taken).take(pa.array(place))


def places_among(ids: pa.Array | pa.ChunkedArray, known: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    """The first place of each id among the ``known``, -1 for an unknown one. Both columns are in memory."""
    found = pc.index_in(ids.cast(pa.large_string()), value_set=known.cast(pa.large_string()))
    places: NDArray[np.int64] = found.fill_null(-1).to_numpy().astype(np.int64)
    return places
