"""Writes a part of a collection row by row, in row groups of bounded size."""

from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.artifacts import ShardWriter

_ROWS_PER_GROUP = 1_000  # random reads of a row decode one group
_CHARACTERS_PER_GROUP = 16 << 20


class PartWriter:
    """One parquet file of documents, queries or judgments; it is there even without a row."""

    def __init__(self, writer: ShardWriter, name: str, schema: pa.Schema) -> None:
        self._writer, self._name, self._schema = writer, name, schema
        coded = [field for field in ("domain", "split") if field in schema.names]
        self._file = pq.ParquetWriter(writer.path(name), schema, compression="zstd", use_dictionary=coded)
        self._pending: list[tuple[Any, ...]] = []
        self._characters = 0
        self.rows = 0

    def add(self, *values: Any) -> None:
        """Appends a row, its values in the schema's order."""
        self._pending.append(values)
        self._characters += sum(len(value) for value in values if isinstance(value, str))
        self.rows += 1
        if len(self._pending) == _ROWS_PER_GROUP or self._characters >= _CHARACTERS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            self._file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self._pending, self._characters = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._file.close()
        if kind is None:
            self._writer.add(self._name)
