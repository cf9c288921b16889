"""Random draws in training, as functions of seed, epoch and texts: keys, and an epoch's hard negatives.

So ranks that share a batch draw the same, whoever holds which text. A resumed run draws as it would have.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.batches import LAYOUTS, masked_cells
from raytriever.errors import UserError
from raytriever.hashes import MIXERS, WEYL, string_hashes


def text_keys(texts: Sequence[str], salt: str = "") -> Tensor:
    """64-bit hashes of texts: int64 (n,). With another ``salt`` they are as good as random numbers of their own."""
    return torch.from_numpy(string_hashes(f"{salt}{text}" for text in texts).view("<i8").astype(np.int64))


def next_random(states: Tensor, steps: Tensor | int = 1) -> Tensor:
    """The output of SplitMix64 (Steele, Lea & Flood 2014) so many ``steps`` after each state; all int64.

    ``raytriever.hashes.numbers_at`` where the tensors are, in the forward pass: torch has no unsigned shift, hence the
    masks.
    """
    numbers = states + steps * _signed(WEYL)
    for shift, factor in zip((30, 27), MIXERS, strict=True):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_READ = ("query_id", "hard_negatives", "masked")


def draw_hard_negatives(rows: pa.Table, count: int, seed: int, epoch: int) -> pa.Table:
    """A stored batch with ``count`` hard negatives a row, drawn without replacement from the row's pool.

    Every set of ``count`` is equally likely. The draw depends on (``seed``, ``epoch``, the row's ``query_id``) alone,
    not on the batch or the place in it. So every rank and every resumed run draws the same. Drawn ones stay in the
    pool's order; a pool of ``count`` or fewer is kept whole.

    ``rows``: a whole stored batch. All columns with a value for each hard negative are drawn with ``hard_negatives``.
    The columns of ``masked`` are the batch's documents and then all rows' hard negatives in row order. It is remapped,
    and loses the hard negatives that were not drawn. Raises ``UserError`` where a column is missing.
    """
    missing = [name for name in _READ if name not in rows.column_names]
    if missing:
        raise UserError(
            f"Hard negatives are drawn anew each epoch, which needs the column {', '.join(missing)}, but the batches"
            f" have {', '.join(rows.column_names)}. Make batches of pairs, or leave out training.hard_negatives."
        )
    sizes = pc.list_value_length(rows["hard_negatives"]).to_numpy().astype(np.int64)
    drawn = _drawn(text_keys(rows["query_id"].to_pylist(), f"{seed} {epoch} "), sizes, count)
    if drawn.all():
        return rows
    for name in LAYOUTS["pairs"].per_negative:
        if name in rows.column_names:
            rows = _with_lists(
                rows, name, np.minimum(sizes, count), pc.list_flatten(rows[name]).filter(pa.array(drawn))
            )
    columns, lengths = _remapped(rows, drawn)
    return _with_lists(rows, "masked", lengths, pa.chunked_array([pa.array(columns, pa.int32())]))


def _drawn(keys: Tensor, sizes: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """For each row's pool, all pools laid end to end, the ``count`` with the smallest of their random numbers."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
    numbers = next_random(keys[torch.from_numpy(row)], torch.from_numpy(place + 1)).numpy().view(np.uint64)
    order = np.lexsort((numbers, row))
    drawn = np.zeros(len(row), dtype=bool)
    drawn[order[place < count]] = True  # sorted by row, so that ``place`` is the rank within it
    return drawn


def _remapped(rows: pa.Table, drawn: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The masks' indices after the draw, without hard negatives that were not drawn, and how many each row has."""
    row, columns = masked_cells(rows)
    is_left = np.concatenate([np.ones(len(rows), dtype=bool), drawn])
    number = np.cumsum(is_left) - 1
    left = is_left[columns]
    return number[columns][left], np.bincount(row[left], minlength=len(rows))


def _with_lists(rows: pa.Table, name: str, lengths: NDArray[np.int64], values: pa.ChunkedArray) -> pa.Table:
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, values.combine_chunks()).cast(field.type)
    return rows.set_column(index, field, lists)
