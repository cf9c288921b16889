"""Rows that change hands between the tasks of two phases, so that those with one key meet in one task.

A task of the earlier phase sorts its rows by the part of the later one that wants them, and writes one file with a
batch for each part. A task of the later phase reads its batch of every file, in the order of their names: what it gets
depends on no worker, and memory is that of a part. Only its own bytes are read, in an object store too.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.artifacts.artifact import ShardWriter
from raytriever.artifacts.long_columns import take_rows
from raytriever.artifacts.storage import Folder
from raytriever.hashes import scatter

_STRINGS_AT_ONCE = 1 << 16
_MULTIPLIERS = scatter(np.arange(1, 65, dtype=np.uint64)) | np.uint64(1)


def write_parts(writer: ShardWriter, name: str, table: pa.Table, part_of: NDArray[np.int64], parts: int) -> None:
    """Adds a file with the rows of each part, ``part_of`` (rows,), which stay in their order."""
    order = np.argsort(part_of, kind="stable")
    bounds = np.searchsorted(part_of[order], np.arange(parts + 1)).tolist()
    table = take_rows(table, order) if parts > 1 else table
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(writer.path(name)), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as file:
        for begin, end in pairwise(bounds):
            rows = table.slice(begin, end - begin).combine_chunks()
            file.write_batch(rows.to_batches()[0] if len(rows) else pa.RecordBatch.from_pylist([], table.schema))
    writer.add(name)


def read_parts(output: str, names: Iterable[str], parts: Iterable[int]) -> pa.Table:
    """The rows of these parts in all of these files of the artifact ``output``: file after file, part after part."""
    folder, wanted, batches = Folder(output), list(parts), []
    for name in names:
        with folder.open_input(name) as source:
            file = pa.ipc.open_file(source)
            batches += [file.get_batch(part) for part in wanted]
    return pa.Table.from_batches(batches)


def string_parts(strings: pa.ChunkedArray, parts: int) -> NDArray[np.int64]:
    """A part for each string, (n,), by a hash: the sum of its bytes, each times a number that its place says.

    Ten times as fast as a hash that tells strings apart, which these need not be.
    """
    if parts == 1:
        return np.zeros(len(strings), dtype=np.int64)
    found = [np.empty(0, dtype=np.int64)]
    for chunk in strings.chunks:
        blocks = (chunk.slice(start, _STRINGS_AT_ONCE) for start in range(0, len(chunk), _STRINGS_AT_ONCE))
        found += [_block_parts(block.cast(pa.large_binary()), parts) for block in blocks]
    return np.concatenate(found)


def _block_parts(block: pa.LargeBinaryArray, parts: int) -> NDArray[np.int64]:
    _, offsets, data = block.buffers()
    bounds = np.frombuffer(offsets, np.int64)[block.offset : block.offset + len(block) + 1]
    lengths, first = np.diff(bounds), int(bounds[0])
    own = np.frombuffer(data, np.uint8)[first : bounds[-1]] if data else np.empty(0, dtype=np.uint8)
    places = np.arange(len(own)) - np.repeat(bounds[:-1] - first, lengths)
    sums = np.concatenate([[np.uint64(0)], np.cumsum((own + np.uint64(1)) * _MULTIPLIERS[places % len(_MULTIPLIERS)])])
    return number_parts(np.diff(sums[bounds - first]), parts)


def number_parts(keys: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """A part for each number, (n,), by a hash."""
    return (scatter(keys) % np.uint64(parts)).astype(np.int64)
