"""Which records of a source are left out or refused, and which queries are held out, by SQL over all of them.

The tables are ``documents`` and ``queries`` (id, text_key, row) and ``judgments`` (query_id, document_id, relevance,
split, row).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.hashes import string_hashes
from raytriever.relations import Relations
from raytriever.reports.log import log
from retrieval.collections.collection import SCHEMAS, Part, TextPart, passage_text
from retrieval.collections.held_out import FEWEST, TRAIN, NewSplits, held_out
from retrieval.collections.records import CrossValidation, DocumentRecord, Format, JudgmentRecord, Source, in_chunks

RecordAt = Callable[[Part, int], Any]
"""The record of a part's row, read again."""
_TEXTS: tuple[TextPart, TextPart] = ("documents", "queries")

TEXT_KEY = pa.field("text_key", pa.uint64(), nullable=False)
"""Of a document or a query: 0 where it has no text; else equal where texts are."""


def record_schema(part: Part) -> pa.Schema:
    """A part of a collection as it is read: texts with their key."""
    return SCHEMAS[part] if part == "judgments" else SCHEMAS[part].append(TEXT_KEY)


def record_batches(format_: Format, part: Part) -> Iterator[pa.RecordBatch]:
    """All records of a part in their order, by ``record_schema``."""
    for chunk in in_chunks(getattr(format_, part)()):
        columns: list[Any] = list(zip(*chunk, strict=True))[1:]  # all but the place
        if part != "judgments":
            columns.append(_text_keys(chunk))
        schema = record_schema(part)
        yield pa.RecordBatch.from_arrays(list(map(pa.array, columns, schema.types)), schema=schema)


def _text_keys(records: list[Any]) -> NDArray[np.uint64]:
    texts = [
        passage_text(record.title, record.text) if isinstance(record, DocumentRecord) else record.text.strip()
        for record in records
    ]
    return np.where([bool(text) for text in texts], np.maximum(string_hashes(texts), 1), 0)


# A part's rows are numbered. Of rows that repeat each other the first is kept. If a format repeats judgments, the first
# that says most is kept: a positive, then a grade of 0.

FIRST = """
    CREATE TABLE first_{part} AS
    SELECT id, min(row) AS row, arg_min(text_key, row) AS text_key, count(*) AS records FROM {part} GROUP BY id
"""
REPEATED = """
    CREATE TABLE repeated_{part} AS
    SELECT later.row, earlier.row AS earlier, later.text_key <> earlier.text_key AS differs
    FROM {part} AS later JOIN first_{part} AS earlier ON earlier.id = later.id
    WHERE earlier.records > 1 AND later.row > earlier.row
"""
REPEATED_JUDGMENTS = """
    CREATE TABLE repeated_judgments AS
    WITH several AS (
        SELECT query_id, document_id, split FROM judgments GROUP BY query_id, document_id, split HAVING count(*) > 1
    )
    SELECT row, lag(row) OVER same AS earlier, relevance <> lag(relevance) OVER same AS differs
    FROM judgments SEMI JOIN several USING (query_id, document_id, split)
    WINDOW same AS (
        PARTITION BY query_id, document_id, split
        ORDER BY CASE WHEN NOT $repeats OR relevance > 0 THEN 0 WHEN relevance = 0 THEN 1 ELSE 2 END, row
    )
    QUALIFY earlier IS NOT NULL
"""
REFUSED = "SELECT row, earlier FROM repeated_{part} WHERE differs OR $always ORDER BY row LIMIT 1"
EMPTY = "SELECT row FROM first_{part} WHERE text_key = 0 ORDER BY row LIMIT 1"
LEFT_OUT = """
    CREATE TABLE left_out AS
    SELECT 'documents' AS part, row, 'repeated_documents' AS reason FROM repeated_documents UNION ALL
    SELECT 'documents', row, 'empty_documents' FROM first_documents WHERE text_key = 0 UNION ALL
    SELECT 'queries', row, 'repeated_queries' FROM repeated_queries UNION ALL
    SELECT 'queries', row, 'empty_queries' FROM first_queries WHERE text_key = 0 UNION ALL
    SELECT 'judgments', judgments.row, CASE
        WHEN repeated.row IS NOT NULL THEN 'repeated_judgments'
        WHEN queries.id IS NULL THEN 'judgments_of_unknown_queries'
        WHEN queries.text_key = 0 THEN 'judgments_of_empty_queries'
        WHEN documents.id IS NULL THEN 'judgments_of_unknown_documents'
        ELSE 'judgments_of_empty_documents'
    END
    FROM judgments
    LEFT JOIN repeated_judgments AS repeated ON repeated.row = judgments.row
    LEFT JOIN first_queries AS queries ON queries.id = query_id
    LEFT JOIN first_documents AS documents ON documents.id = document_id
    WHERE repeated.row IS NOT NULL OR coalesce(queries.text_key, 0) = 0 OR coalesce(documents.text_key, 0) = 0
"""
REASONS = "SELECT reason, count(*), min(row) FROM left_out GROUP BY reason ORDER BY reason"
NEAREST = """
    SELECT id FROM first_{part} ORDER BY contains(id, $id) OR contains($id, id) DESC, levenshtein(id, $id), id LIMIT 3
"""
KEPT = "SELECT (SELECT count(*) FROM {part}) - (SELECT count(*) FROM left_out WHERE part = '{part}')"
KEPT_JUDGMENTS = """
    CREATE TABLE kept AS
    SELECT query_id, document_id, relevance, split, row FROM judgments
    WHERE row NOT IN (SELECT row FROM left_out WHERE part = 'judgments')
"""
SPLITS = "SELECT DISTINCT split FROM kept ORDER BY split"
OF_TWO_SPLITS = """
    SELECT row FROM kept
    WHERE query_id IN (SELECT query_id FROM kept WHERE split = $split)
        AND query_id IN (SELECT query_id FROM kept WHERE split <> $split)
    ORDER BY row LIMIT 1
"""
QUERIES_OF = "SELECT DISTINCT query_id FROM kept WHERE split = $split ORDER BY query_id"
ANSWERED = "SELECT DISTINCT query_id AS id FROM kept WHERE split = $split AND relevance > 0 ORDER BY id"
TEXTS = """
    WITH answers AS (SELECT query_id, document_id FROM kept WHERE split = $split AND relevance > 0), texts AS (
        SELECT query_id, text_key FROM answers JOIN first_documents ON id = document_id UNION ALL
        SELECT query_id, text_key FROM answers JOIN first_queries ON id = query_id
    )
    SELECT dense_rank() OVER (ORDER BY query_id) - 1 AS query, dense_rank() OVER (ORDER BY text_key) - 1 AS text
    FROM texts
"""


def find_left_out(db: Relations, source: Source, record_at: RecordAt) -> None:
    """Makes the table ``left_out``. Raises ``UserError`` for records that repeat others or are empty."""
    format_, policies = source
    for texts in _TEXTS:
        db.run(FIRST.format(part=texts))
        db.run(REPEATED.format(part=texts))
    db.run(REPEATED_JUDGMENTS, repeats=format_.repeats)
    for part in SCHEMAS:
        one_is_kept = format_.repeats if part == "judgments" else format_.keeps_first
        if one_is_kept:
            continue
        always = part != "judgments" and not format_.repeats  # equal judgments say nothing new
        for later, earlier in db.rows(REFUSED.format(part=part), always=always):
            raise _repetition(format_, record_at(part, later), record_at(part, earlier))
    for texts in _TEXTS:
        for (row,) in db.rows(EMPTY.format(part=texts)) if getattr(policies, f"empty_{texts}") == "refuse" else ():
            raise _emptiness(record_at(texts, row), texts)
    db.run(LEFT_OUT)


def check_kept(db: Relations, source: Source, record_at: RecordAt) -> None:
    """Raises ``UserError`` for a source that lacks documents, queries or judgments, or what its judgments name."""
    format_, policies = source
    kept = {part: db.rows(KEPT.format(part=part))[0][0] for part in SCHEMAS}
    found = {reason: (count, row) for reason, count, row in db.rows(REASONS)}
    wanted: dict[Part, str] = {"documents": format_.documents_name}
    if format_.judgments_name or "empty_queries" in found:
        wanted["queries"] = format_.queries_name
    for part, where in wanted.items():
        if not kept[part]:
            raise UserError(f"{where} holds no {part} with a text. Is it the right file, and is it complete?")
    unknown = {part: found.get(f"judgments_of_unknown_{part}", (0, 1 << 63)) for part in _TEXTS}
    if policies.unknown_ids == "refuse" and any(count for count, _ in unknown.values()):
        first = min(_TEXTS, key=lambda part: unknown[part][1])
        record = record_at("judgments", unknown[first][1])
        id_ = record[1 if first == "queries" else 2]
        near = ", ".join(repr(other) for (other,) in db.rows(NEAREST.format(part=first), id=id_))
        raise UserError(
            f"{record.place} names {id_!r}, which {wanted[first]} does not hold; in all, {unknown['documents'][0]}"
            f" judgments name unknown documents and {unknown['queries'][0]} unknown queries. Ids like it: {near}."
            " Complete the files, or leave these judgments out: source.unknown_ids=drop."
        )
    if format_.judgments_name and not kept["judgments"]:
        left_out = {reason: count for reason, (count, _) in found.items() if "judgments" in reason}
        counted = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
        raise UserError(
            f"No judgments to keep in {format_.judgments_name}: {sum(left_out.values())} were left out"
            f" ({counted or 'there are none'}). Are these the right files?"
        )
    db.run(KEPT_JUDGMENTS)


def moved_queries(
    db: Relations, source: Source, settings: NewSplits | None, of_all: list[str], record_at: RecordAt
) -> tuple[str, dict[str, str]]:
    """A split, and the new split of queries of it: by the source's folds, or by ``settings``; ('', {}) without both.

    ``of_all``: the splits of all sources, which new ones are beside. Raises ``UserError`` where the split can't be
    shared out.
    """
    (format_, policies), splits = source, [split for (split,) in db.rows(SPLITS)]
    if splits and policies.cross_validation:
        return _share_out(db, format_.judgments_name, splits, policies.cross_validation, record_at)
    return _hold_out(db, format_.judgments_name, of_all, settings) if splits and settings else ("", {})


def _share_out(
    db: Relations, judgments_name: str, splits: list[str], folds: CrossValidation, record_at: RecordAt
) -> tuple[str, dict[str, str]]:
    """Raises ``UserError`` where no judgment is of the split, or one of its queries is judged in another too."""
    for (row,) in db.rows(OF_TWO_SPLITS, split=folds.split):
        record = record_at("judgments", row)
        raise UserError(
            f"{record.place} judges query {record.query_id!r} in split '{record.split}', and it is judged in"
            f" {'another split' if record.split == folds.split else f'split {folds.split!r}'} too."
            f" cross_validation divides the queries of '{folds.split}', so a test query could be trained on. Read"
            f" split '{folds.split}' alone (splits: [{folds.split}], where the kind has that setting), or remove"
            " the query from the other split."
        )
    if folds.split not in splits:
        raise UserError(
            f"cross_validation.split is '{folds.split}', but {judgments_name} has no judgments of it. Splits there:"
            f" {', '.join(splits)}."
        )
    return folds.split, {query: folds.split_of(query) for (query,) in db.rows(QUERIES_OF, split=folds.split)}


def _hold_out(db: Relations, where: str, splits: list[str], settings: NewSplits) -> tuple[str, dict[str, str]]:
    """Queries for splits that are missing; ('', {}) where none is, or where none is there to take."""
    taken_from, wanted = settings.wanted(splits)
    if not wanted:
        return "", {}
    if taken_from not in splits:
        raise UserError(
            f"new_splits take queries from '{TRAIN}', but the splits in {where} are {', '.join(splits)}. Read one"
            f" of them alone (splits: [{splits[0]}], where the kind has that setting), or name one '{TRAIN}'."
        )
    ids = [id_ for (id_,) in db.rows(ANSWERED, split=taken_from)]
    if not ids:
        return "", {}
    if len(ids) < FEWEST:
        raise UserError(
            f"Too few queries to hold some out: {where} answers {len(ids)}, and {FEWEST} are needed. Equal texts are"
            " one query. Give more, or splits of your own and new_splits: null."
        )
    linked = pa.concat_tables(db.tables(TEXTS, split=taken_from))
    queries, texts = (linked[column].to_numpy() for column in ("query", "text"))
    found, stay_together = held_out(ids, queries, texts, dict.fromkeys(wanted, settings.size(len(ids))))
    told = ", ".join(f"{len(rows):,} are '{split}' now" for split, rows in found.items())
    told += f", {len(ids) - sum(map(len, found.values())):,} '{TRAIN}'" if taken_from != TRAIN else ""
    shared = "; those that share a document or a text stayed together" if stay_together else ""
    log.info(f"{where}: of {len(ids):,} queries of '{taken_from}' {told}{shared}")
    if not stay_together:
        log.warning(
            "Warning: most are linked by documents that they share, or by equal texts, so some are used in training"
            " and in testing. Give splits of your own if that matters."
        )
    return taken_from, {ids[row]: split for split, rows in found.items() for row in rows.tolist()}


def _repetition(format_: Format, later: Any, earlier: Any) -> UserError:
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
        f"{later.place}: id {later.id!r} already belongs to {where}{other}. Ids must be unique: drop one of the"
        " two, or give it another id."
    )


def _emptiness(record: Any, part: TextPart) -> UserError:
    """A record without a text."""
    what = "document {!r} has neither title nor text" if part == "documents" else "query {!r} has no text"
    return UserError(
        f"{record.place}: {what.format(record.id)}. Give it a text, or leave all such records and their judgments"
        f" out: source.empty_{part}=drop."
    )
