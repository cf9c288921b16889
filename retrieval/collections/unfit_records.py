"""Records of a format that a collection can't hold: repeated ids, texts that are empty, and what is said of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.hashes import string_hashes
from retrieval.collections.collection import SCHEMAS, Part, TextPart, passage_text
from retrieval.collections.records import DocumentRecord, Format, JudgmentRecord, in_chunks

TEXT_KEY = pa.field("text_key", pa.uint64(), nullable=False)
"""Of a document or a query: 0 where it has no text; else equal where texts are, if the format compares them."""


def record_schema(part: Part) -> pa.Schema:
    """A part of a collection as it is read: texts with their key."""
    return SCHEMAS[part] if part == "judgments" else SCHEMAS[part].append(TEXT_KEY)


def record_batches(format_: Format, part: Part) -> Iterator[pa.RecordBatch]:
    """All records of a part in their order, by ``record_schema``."""
    for chunk in in_chunks(getattr(format_, part)()):
        columns: list[Any] = list(zip(*chunk, strict=True))[1:]  # all but the place
        if part != "judgments":
            columns.append(_text_keys(chunk, compares=format_.repeats and not format_.keeps_first))
        schema = record_schema(part)
        yield pa.RecordBatch.from_arrays(list(map(pa.array, columns, schema.types)), schema=schema)


def _text_keys(records: list[Any], *, compares: bool) -> NDArray[np.uint64]:
    texts = [
        passage_text(record.title, record.text) if isinstance(record, DocumentRecord) else record.text.strip()
        for record in records
    ]
    keys = np.maximum(string_hashes(texts), np.uint64(1)) if compares else np.ones(len(texts), np.uint64)
    return np.where([bool(text) for text in texts], keys, np.uint64(0))


def repetition(format_: Format, later: Any, earlier: Any) -> UserError:
    """Two records that must not both be there."""
    is_near = earlier.place.file == later.place.file
    where = f"{earlier.place.unit} {earlier.place.line}" if is_near else str(earlier.place)
    if isinstance(later, JudgmentRecord):
        return UserError(
            f"{later.place} judges query {later.query_id!r} and document {later.document_id!r} with {later.relevance},"
            f" {where} with {earlier.relevance}. Keep one of the two."
        )
    other = " with another text" if format_.repeats else ""
    return UserError(
        f"{later.place}: id {later.id!r} is already that of {where}{other}. Ids must be unique: drop one of the two, or"
        " give it another id."
    )


def emptiness(record: Any, part: TextPart) -> UserError:
    """A record without a text."""
    what = "document {!r} has neither title nor text" if part == "documents" else "query {!r} has no text"
    return UserError(
        f"{record.place}: {what.format(record.id)}. Give it a text, or set empty_{part} to 'drop' to leave all such"
        " records and their judgments out."
    )
