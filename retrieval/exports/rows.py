"""Rows of a stored collection in its order, a row group at a time."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raytriever.retrieval.collections.stored import Part, StoredCollection
from raytriever.retrieval.errors import UserError


def rows(collection: StoredCollection, part: Part, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, row by row."""
    for table in collection.rows_of(part).tables(columns):
        yield from zip(*(table[column].to_pylist() for column in columns), strict=True)


def judgments_by_split(collection: StoredCollection) -> Iterator[tuple[str, pa.Table]]:
    """Splits in turn, each with its next few rows (query_id, document_id, relevance), in stored order."""
    for table in collection.rows_of("judgments").tables(["query_id", "document_id", "relevance", "split"]):
        for split in sorted(table["split"].unique().to_pylist()):
            yield split, table.filter(pc.equal(table["split"], split)).drop_columns("split")


def has_values(collection: StoredCollection, part: Part, column: str) -> bool:
    """Whether any row has more in this column of strings or lists than '' or []."""
    for table in collection.rows_of(part).tables([column]):
        values = table[column]
        length = pc.list_value_length if pa.types.is_list(values.type) else pc.binary_length
        if (pc.max(length(values)).as_py() or 0) > 0:
            return True
    return False


def require_judgments(collection: StoredCollection, what: str) -> None:
    """Raises ``UserError`` where there are none, and the format is nothing without them."""
    if not len(collection.rows_of("judgments")):
        raise UserError(
            f"{collection.uri} has no judgments, and {what} is not complete without them. Export to another format, or"
            " make the collection with its judgments."
        )


def require_name(split: str, collection: StoredCollection) -> None:
    """Raises ``UserError`` where a split can't be part of a file's name."""
    if not split or split.startswith(".") or set(split) & set("/\\\0") or len(split.encode()) > 200:
        raise UserError(
            f"{collection.uri}: the split {split!r:.80} can't be the name of a file. Rename it in the source (no /, no"
            " \\, no dot in front, at most 200 bytes) and collect again."
        )
