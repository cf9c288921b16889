"""Rows in any order at the cost of those rows: tables as uncompressed Arrow files, read through memory maps.

Batches take rows from all over a collection. Parquet decodes a whole row group for one of its rows. If each shard needs
some rows of every group, everything is read once a shard, a cost that grows with the square of the corpus.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ROWS_OF_A_PIECE = 1 << 14
_BYTES_OF_A_PIECE = 32 << 20


def write_mapped_rows(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Writes the rows of all tables to one file, in order."""
    waiting = schema.empty_table()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        for table in tables:
            waiting = pa.concat_tables([waiting, table.select(schema.names).cast(schema)])
            if len(waiting) >= _ROWS_OF_A_PIECE or waiting.nbytes >= _BYTES_OF_A_PIECE:
                file.write_table(waiting.combine_chunks())
                waiting = schema.empty_table()
        file.write_table(waiting.combine_chunks())


class MappedRows:
    """The rows of files that ``write_mapped_rows`` wrote, under one numbering."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._pieces: list[pa.RecordBatch] = []
        for path in paths:
            with pa.memory_map(str(path)) as source:
                file = pa.ipc.open_file(source)
                self.schema: pa.Schema = file.schema
                self._pieces += [file.get_batch(number) for number in range(file.num_record_batches)]
        self._starts = np.cumsum([0, *(piece.num_rows for piece in self._pieces)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(piece.nbytes for piece in self._pieces)

    def distinct(self, column: str) -> set[Any]:
        """All values of a column."""
        return {value for piece in self._pieces for value in piece[column].unique().to_pylist()}

    def take(self, rows: NDArray[np.int64]) -> pa.Table:
        """The given rows in the given order; repeats are allowed. Every column has one chunk."""
        distinct, place = np.unique(rows, return_inverse=True)
        bounds = np.searchsorted(distinct, self._starts)
        found = [self.schema.empty_table()]
        for number in np.flatnonzero(np.diff(bounds)):
            wanted = distinct[bounds[number] : bounds[number + 1]] - self._starts[number]
            found.append(pa.Table.from_batches([self._pieces[number].take(pa.array(wanted))]))
        return pa.concat_tables(found).combine_chunks().take(pa.array(place))
