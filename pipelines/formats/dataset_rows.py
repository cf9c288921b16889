"""Documents or queries that another tool hands over as a ``datasets.Dataset``, as a collection of that one part.

Texts are kept as they are, empty ones too: whoever hands them over expects a result that counts each.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, QUERIES, TextPart, record_batches

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 1_000
_NOT_IN_RUNS = re.compile(r"[\s%]")


class DatasetRows:
    """A ``collection.Source`` with the rows of one data set as its documents, or as its queries; no judgments.

    Columns: ``id`` and ``text``, strings; of documents also ``title``, where there is one. Ids are stored as
    ``stored_id`` says. ``name``: what the data set is, for messages. Memory: the ids and one batch. Raises
    ``UserError`` where a column is absent or holds something else, for a row without id or text, and for an id that
    comes again.
    """

    def __init__(self, dataset: "Dataset", part: TextPart, name: str) -> None:
        self._columns = [column for column in ("id", "title", "text") if column in dataset.column_names]
        self._rows: Any = dataset.with_format("arrow").select_columns(self._columns)
        self._part = part
        self._name = name
        self.counts: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        for column in ("id", "text"):
            self._require_strings(column)
        self._require_unique_ids()

    def documents(self) -> Iterator[pa.RecordBatch]:
        """The rows, if they are documents, in their order; a title that is null is empty."""
        rows = ((stored_id(row["id"]), row.get("title") or "", row["text"], "") for row in self._read("documents"))
        return record_batches(rows, DOCUMENTS)

    def queries(self) -> Iterator[pa.RecordBatch]:
        """The rows, if they are queries, in their order."""
        no_answers: list[str] = []
        rows = ((stored_id(row["id"]), row["text"], "", no_answers) for row in self._read("queries"))
        return record_batches(rows, QUERIES)

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """None."""
        return iter(())

    def fingerprint(self) -> dict[str, Any]:
        """A SHA-256 over all ids, titles and texts."""
        digest = hashlib.sha256()
        for table in self._rows.iter(_ROWS_AT_ONCE):
            digest.update(json.dumps([table[column].to_pylist() for column in self._columns]).encode())
        return {"part": self._part, "columns": self._columns, "sha256": digest.hexdigest()}

    def _read(self, part: TextPart) -> Iterator[dict[str, str]]:
        number = 0
        for table in self._rows.iter(_ROWS_AT_ONCE) if part == self._part else ():
            for row in table.to_pylist():
                number += 1
                if not row["id"] or row["text"] is None:
                    raise UserError(f"{self._name}, row {number} has no id or no text (null). Give it both.")
                yield row

    def _require_strings(self, column: str) -> None:
        if column not in self._columns:
            raise UserError(f"{self._name} has no column '{column}'. It needs 'id' and 'text', strings.")
        type_ = self._rows.features.arrow_schema.field(column).type
        if not (pa.types.is_string(type_) or pa.types.is_large_string(type_)):
            raise UserError(f"{self._name}: column '{column}' holds {type_}. Make it strings.")

    def _require_unique_ids(self) -> None:
        ids = self._rows.select_columns(["id"])[:]["id"]
        counted = pc.value_counts(ids)
        repeated = counted.filter(pc.greater(counted.field("counts"), 1))
        if len(repeated):
            raise UserError(
                f"{self._name}: id {repeated[0]['values'].as_py()!r} stands in {repeated[0]['counts']} rows. Scores are"
                " told apart by id, so ids must be unique: drop all rows but one, or give them ids of their own."
            )


def stored_id(given: str) -> str:
    """An id with its whitespace and % written as in URLs (%20), because a TREC run holds no whitespace in ids."""
    return _NOT_IN_RUNS.sub(lambda found: quote(found[0]), given)


def given_id(stored: str) -> str:
    """The inverse of ``stored_id``."""
    return unquote(stored)
