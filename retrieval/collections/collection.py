"""What a collection is: documents, queries and judgments, whatever format they came in."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in columns.items()])


DOCUMENTS = _schema(id=pa.string(), title=pa.string(), text=pa.string(), domain=pa.string())
QUERIES = _schema(id=pa.string(), text=pa.string(), domain=pa.string(), answers=pa.list_(pa.string()))
JUDGMENTS = _schema(query_id=pa.string(), document_id=pa.string(), relevance=pa.int32(), split=pa.string())

_BATCH_ROWS = 8192
_BATCH_CHARACTERS = 16 << 20  # at most 64 MiB of UTF-8, far below the 2 GiB that a string column can hold


class Source(Protocol):
    """A collection in some format, read as record batches of the three schemas above.

    Ids are unique; every judgment names a document and a query of the collection, each pair once a split.
    Order is a function of the input alone. All methods raise ``UserError`` for input that breaks the format.
    """

    @property
    def counts(self) -> dict[str, int]:
        """Facts worth recording about what was read; complete once all three were read to the end."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest is to say of the input: an interpreter's version, say."""

    @property
    def dropped(self) -> dict[str, int]:
        """What was left out: reason to number; complete once all three were read to the end."""

    def documents(self) -> Iterator[pa.RecordBatch]:
        """The documents, in batches of schema ``DOCUMENTS``."""

    def queries(self) -> Iterator[pa.RecordBatch]:
        """The queries, in batches of schema ``QUERIES``; ``answers``: strings that answer it, often none."""

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """The judgments, in batches of schema ``JUDGMENTS``; relevance 0 or less means not relevant."""

    def fingerprint(self) -> dict[str, Any]:
        """A deterministic description of the input as plain JSON values: equal where the input is equal."""


def passage_text(title: str, text: str) -> str:
    """Title and text as the one string that is encoded and indexed, joined as BEIR does."""
    return f"{title} {text}".strip()


def record_batches(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Gathers rows, their values in the schema's order, into batches bounded in rows and characters."""
    pending: list[tuple[Any, ...]] = []
    characters = 0
    for row in rows:
        pending.append(row)
        characters += sum(len(value) for value in row if isinstance(value, str))
        if len(pending) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield _record_batch(pending, schema)
            pending, characters = [], 0
    if pending:
        yield _record_batch(pending, schema)


def _record_batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
