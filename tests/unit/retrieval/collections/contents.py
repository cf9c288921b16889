"""All of a collection as lists of rows, for tests."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from retrieval.collections.checked_source import CheckedSource


class Contents(NamedTuple):
    """Rows with their values in the order of the schemas."""

    documents: list[tuple[Any, ...]]
    queries: list[tuple[Any, ...]]
    judgments: list[tuple[Any, ...]]


def contents(source: CheckedSource) -> Contents:
    """Reads all three parts, in the order in which a collection is stored."""
    return Contents(_rows(source.documents()), _rows(source.queries()), _rows(source.judgments()))


def _rows(batches: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
