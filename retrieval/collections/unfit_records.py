"""From a format's records to a collection: unique ids, no empty texts, no judgments of what is not there.

Judgments of training sets repeat: each pair of a query and a document is kept once a split, with its best grade.
Records are compared by hashes of 64 bits; before one is refused the strings themselves are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.hashes import string_hashes
from retrieval.collections.collection import SCHEMAS, Part, TextPart, passage_text
from retrieval.collections.records import DocumentRecord, Format, JudgmentRecord, Policies, in_chunks

REASONS = (
    "repeated_documents",
    "empty_documents",
    "repeated_queries",
    "empty_queries",
    "repeated_judgments",
    "judgments_of_unknown_queries",
    "judgments_of_empty_queries",
    "judgments_of_unknown_documents",
    "judgments_of_empty_documents",
)
"""Why a record is left out; of several reasons the first counts."""
OF_PART: dict[Part, range] = {"documents": range(2), "queries": range(2, 4), "judgments": range(4, len(REASONS))}
"""Which of ``REASONS`` are a part's."""

KEYS = pa.schema([("what", pa.uint8()), ("key", pa.uint64()), ("value", pa.uint64()), ("row", pa.int64())])
_DOCUMENT, _QUERY, _JUDGED_DOCUMENT, _JUDGED_QUERY, _JUDGED_PAIR = range(5)
_EMPTY = np.uint64(0)  # the value of a text; of a pair it is 0 for a positive, 1 for a grade of 0, 2 for a lower one
_TEXTS: tuple[tuple[TextPart, int, int], ...] = (
    ("documents", _DOCUMENT, _JUDGED_DOCUMENT),
    ("queries", _QUERY, _JUDGED_QUERY),
)


def judged_pair(record: JudgmentRecord) -> str:
    """Split, query and document in one string that no other three share."""
    return f"{len(record.split)} {len(record.query_id)} {record.split}{record.query_id}{record.document_id}"


def keyed_records(format_: Format, part: Part) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """All records of a part as rows of a collection, and ``KEYS``: what they are compared by, rows from 0."""
    first = 0
    for chunk in in_chunks(getattr(format_, part)()):
        columns = list(zip(*chunk, strict=True))[1:]  # all but the place
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMAS[part], strict=True)]
        rows = np.arange(first, first + len(chunk))
        first += len(chunk)
        tables = [
            pa.table([np.full(len(chunk), what, np.uint8), keys, values, rows], schema=KEYS)
            for what, keys, values in _compared(format_, part, chunk)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[part]), pa.concat_tables(tables)


def _compared(
    format_: Format, part: Part, chunk: Sequence[Any]
) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]]:
    """What kind of key, the keys and their values."""
    if part == "judgments":
        grades = np.array([record.relevance for record in chunk])
        signs = np.where(grades > 0, 0, np.where(grades == 0, 1, 2)).astype(np.uint64)
        yield _JUDGED_DOCUMENT, string_hashes(record.document_id for record in chunk), signs
        yield _JUDGED_QUERY, string_hashes(record.query_id for record in chunk), signs
        yield _JUDGED_PAIR, string_hashes(map(judged_pair, chunk)), signs
        return
    texts = [
        passage_text(record.title, record.text) if isinstance(record, DocumentRecord) else record.text.strip()
        for record in chunk
    ]
    is_there = np.array([bool(text) for text in texts])
    compares_texts = format_.repeats and not format_.keeps_first
    hashes = np.maximum(string_hashes(texts), np.uint64(1)) if compares_texts else np.ones(len(texts), np.uint64)
    what = _DOCUMENT if part == "documents" else _QUERY
    yield what, string_hashes(record.id for record in chunk), np.where(is_there, hashes, _EMPTY)


def unfit_rows(
    keys: pa.Table, format_: Format, policies: Policies, record_at: Callable[[Part, int], Any]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Rows that are left out, and why: a place in ``REASONS``; of all that have one of these ``KEYS``, in their order.

    Raises ``UserError`` for what the policies refuse, with the records that ``record_at`` finds by part and row.
    """
    what, key, value, row = (keys[name].to_numpy() for name in KEYS.names)
    for part, of_part, judged in _TEXTS:
        own, asked = what == of_part, what == judged
        ids, values, rows = key[own], value[own], row[own]
        distinct, first, place = np.unique(ids, return_index=True, return_inverse=True)
        repeated = first[place] != np.arange(len(ids))
        differs = values != values[first[place]]
        for number in () if format_.keeps_first else np.flatnonzero(repeated & (differs | (not format_.repeats)))[:1]:
            earlier = record_at(part, int(rows[first[place[number]]]))
            raise _repetition(format_, record_at(part, int(rows[number])), earlier)
        empty = ~repeated & (values == _EMPTY)
        for number in np.flatnonzero(empty)[:1] if getattr(policies, f"empty_{part}") == "refuse" else ():
            raise _emptiness(record_at(part, int(rows[number])), part)
        yield REASONS.index(f"repeated_{part}"), rows[repeated]
        yield REASONS.index(f"empty_{part}"), rows[empty]
        found = np.searchsorted(distinct, key[asked])
        known = np.append(distinct, np.uint64(0))[found] == key[asked]
        known &= found < len(distinct)
        is_empty = known & np.append(values[first] == _EMPTY, False)[found]
        yield REASONS.index(f"judgments_of_unknown_{part}"), row[asked][~known]
        yield REASONS.index(f"judgments_of_empty_{part}"), row[asked][is_empty]
    pairs, signs, rows = (column[what == _JUDGED_PAIR] for column in (key, value, row))
    order = np.lexsort((rows, signs, pairs) if format_.repeats else (rows, pairs))
    again = 1 + np.flatnonzero(pairs[order][1:] == pairs[order][:-1])
    repeated = rows[order][again]
    if len(repeated) and not format_.repeats:
        number = int(np.argmin(repeated))
        earlier = record_at("judgments", int(rows[order][again[number] - 1]))
        raise _repetition(format_, record_at("judgments", int(repeated[number])), earlier)
    yield REASONS.index("repeated_judgments"), repeated


def _repetition(format_: Format, later: Any, earlier: Any) -> UserError:
    name = judged_pair if isinstance(later, JudgmentRecord) else lambda record: record.id
    if name(later) != name(earlier):
        return UserError(
            f"{later.place}: {name(later)!r} has the same 64-bit digest as another id, so it would be taken for that"
            " one. Rename it."
        )
    is_near = earlier.place.file == later.place.file
    where = f"{earlier.place.unit} {earlier.place.line}" if is_near else str(earlier.place)
    if isinstance(later, JudgmentRecord):
        return UserError(
            f"{later.place} judges query {later.query_id!r} and document {later.document_id!r}, as {where} does. Keep"
            " one of the two."
        )
    other = " with another text" if format_.repeats else ""
    return UserError(
        f"{later.place}: id {later.id!r} is already that of {where}{other}. Ids must be unique: drop one of the two, or"
        " give it another id."
    )


def _emptiness(record: Any, part: TextPart) -> UserError:
    what = "document {!r} has neither title nor text" if part == "documents" else "query {!r} has no text"
    return UserError(
        f"{record.place}: {what.format(record.id)}. Give it a text, or set empty_{part} to 'drop' to leave all such"
        " records and their judgments out."
    )


def row_of_both(judgments: pa.Table, split: str) -> int | None:
    """The first row whose query is judged in the split and in another one; None where there is none."""
    own = pc.equal(judgments["split"], split)
    queries = judgments["query_id"].combine_chunks()
    shared = [pc.is_in(queries, value_set=queries.filter(side)) for side in (own, pc.invert(own))]
    found = np.flatnonzero(pc.and_(*shared).to_numpy(zero_copy_only=False))
    return int(found[0]) if len(found) else None
