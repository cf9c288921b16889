"""Rows that change hands between the tasks of two phases, so that those with one key meet in one task.

A task of the earlier phase sorts its rows by the part of the later one that wants them, and writes one file with a
batch for each part. A task of the later phase reads its batch of every file, in the order of their names: what it gets
depends on no worker, and memory is that of a part. Only its own bytes are read, in an object store too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.artifacts.artifact import ShardWriter
from raytriever.artifacts.long_columns import take_rows
from raytriever.artifacts.storage import Folder
from raytriever.hashes import scatter


@contextmanager
def new_file(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchFileWriter]:
    """A file of batches that are read one by one, compressed, since it is read once."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as file:
        yield file


def write_parts(writer: ShardWriter, name: str, table: pa.Table, part_of: NDArray[np.int64], parts: int) -> None:
    """Adds a file with the rows of each part, ``part_of`` (rows,), which stay in their order."""
    order = np.argsort(part_of, kind="stable")
    bounds = np.searchsorted(part_of[order], np.arange(parts + 1)).tolist()
    table = take_rows(table, order) if parts > 1 else table
    with new_file(writer.path(name), table.schema) as file:
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


def number_parts(keys: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """A part for each number, (n,), by a hash."""
    return (scatter(keys) % np.uint64(parts)).astype(np.int64)
