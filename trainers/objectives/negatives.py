"""Hard negatives drawn anew each epoch from the pool that every stored row carries."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.batches import LAYOUTS
from raytriever.errors import UserError

if TYPE_CHECKING:
    from trainers.engine.reading import BatchSource

_READ = ("query_id", "hard_negatives", "masked")


def require_pools(batches: "BatchSource", count: int | None) -> None:
    """Raises ``UserError`` where ``count`` hard negatives a row are to be drawn and no row of the first epoch has any.

    Batches and rows without any are no mistake beside others that have some. Reads until it finds one.
    """
    if not count:
        return
    for index in range(batches.number_of_batches(0)):
        rows = batches.read(0, index)
        if "hard_negatives" not in rows.column_names or len(pc.list_flatten(rows["hard_negatives"])):
            return  # what lacks the column is refused where it is read
    raise UserError(
        f"training.hard_negatives is {count}, but no row of the batches in {batches.uri} has a hard negative to draw."
        " Make batches with hard negatives ('negatives' or 'judged_negatives' of raytriever filter), or leave it out."
    )


def draw_hard_negatives(rows: pa.Table, count: int, seed: int, epoch: int) -> pa.Table:
    """A stored batch with ``count`` hard negatives a row, drawn without replacement from the row's pool.

    Every set of ``count`` is equally likely, and which one is drawn depends on (``seed``, ``epoch``, the row's
    ``query_id``) alone: not on the batch or the place in it, so every rank and every resumed run draws the same.
    Drawn ones stay in the pool's order; a pool of ``count`` or fewer is kept whole.

    ``rows``: a whole stored batch. Whatever columns it has for each hard negative are drawn with ``hard_negatives``;
    ``masked``, whose columns are the batch's documents and then all rows' hard negatives in row order, is counted
    anew and loses the hard negatives that were not drawn. Raises ``UserError`` where a column is missing, or
    ``masked`` names a column that the batch doesn't have.
    """
    missing = [name for name in _READ if name not in rows.column_names]
    if missing:
        raise UserError(
            f"Hard negatives are drawn anew each epoch, which needs the column {', '.join(missing)}; the batches have"
            f" {', '.join(rows.column_names)}. Make batches of pairs, or leave out training.hard_negatives."
        )
    sizes = pc.list_value_length(rows["hard_negatives"]).to_numpy().astype(np.int64)
    drawn = _drawn(_keys(rows["query_id"].to_pylist(), seed, epoch), sizes, count)
    if drawn.all():
        return rows
    for name in LAYOUTS["pairs"].per_negative:
        if name in rows.column_names:
            rows = _with_lists(
                rows, name, np.minimum(sizes, count), pc.list_flatten(rows[name]).filter(pa.array(drawn))
            )
    columns, lengths = _recounted(rows["masked"], drawn)
    return _with_lists(rows, "masked", lengths, pa.chunked_array([pa.array(columns, pa.int32())]))


def _drawn(keys: NDArray[np.uint64], sizes: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Of each row's pool, all pools laid end to end, the ``count`` with the smallest of their random numbers."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(row)) - _starts(sizes)[row]
    order = np.lexsort((_random_numbers(keys[row], place), row))
    drawn = np.zeros(len(row), dtype=bool)
    drawn[order[place < count]] = True  # sorted by row, so that ``place`` is the rank within it
    return drawn


def _keys(query_ids: list[str], seed: int, epoch: int) -> NDArray[np.uint64]:
    digests = (hashlib.blake2b(f"{seed} {epoch} {name}".encode(), digest_size=8).digest() for name in query_ids)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _random_numbers(keys: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Number ``places`` of the stream that starts at ``keys``: SplitMix64 (Steele, Lea & Flood 2014)."""
    numbers: NDArray[np.uint64] = keys + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _recounted(masked: pa.ChunkedArray, drawn: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The columns that are left, counted anew, and how many each row has."""
    lengths = pc.list_value_length(masked).to_numpy().astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    columns = pc.list_flatten(masked).to_numpy().astype(np.int64)
    documents = len(lengths)
    if columns.max(initial=-1) >= documents + len(drawn):
        raise UserError(
            f"A row leaves out column {columns.max()}, but its batch has only {documents + len(drawn)} columns"
            f" ({documents} documents and {len(drawn)} hard negatives). Make the batches again."
        )
    is_left = np.concatenate([np.ones(documents, dtype=bool), drawn])
    number = np.cumsum(is_left) - 1
    left = (columns < 0) | is_left[columns]
    renumbered = np.where(columns < 0, columns, number[columns])[left]
    return renumbered, np.bincount(row[left], minlength=documents)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(sizes) - sizes


def _with_lists(rows: pa.Table, name: str, lengths: NDArray[np.int64], values: pa.ChunkedArray) -> pa.Table:
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, values.combine_chunks()).cast(field.type)
    return rows.set_column(index, field, lists)
