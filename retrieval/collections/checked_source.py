"""From a format's records to a collection: unique ids, no empty texts, no judgments of what is not there.

Judgments of training sets repeat: each pair of a query and a document is kept once a split, with its best grade.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, passage_text, record_batches
from retrieval.collections.digests import DigestSet
from retrieval.collections.records import (
    CrossValidation,
    DocumentRecord,
    Format,
    JudgmentRecord,
    Policies,
    QueryRecord,
    in_chunks,
)

REPEATED = "repeated_judgments"


def judged_pair(record: JudgmentRecord) -> str:
    """Split, query and document in one string that no other three share."""
    return f"{len(record.split)} {len(record.query_id)} {record.split}{record.query_id}{record.document_id}"


def distinct_judgments(
    read: Callable[[], Iterator[JudgmentRecord]], left_out: Counter[str]
) -> Iterator[list[JudgmentRecord]]:
    """The judgments that ``read`` gives, each pair once: positives first, then those of grade 0, then lower ones.

    A pair that is a positive anywhere is one, and one that has grade 0 anywhere (a hard negative) has no lower grade (a
    random one). Of several grades above 0, or below, the first stays. ``left_out`` counts the others. Reads once for
    each of the three that there is; in memory are eight bytes for each pair.
    """
    pairs, signs = DigestSet(), {1}

    def of_sign(wanted: int) -> Iterator[JudgmentRecord]:
        for record in read():
            sign = (record.relevance > 0) - (record.relevance < 0)
            signs.add(sign)
            if sign == wanted:
                yield record

    for sign in (1, 0, -1):
        for chunk in in_chunks(of_sign(sign)) if sign in signs else ():
            new = pairs.add(list(map(judged_pair, chunk)))
            left_out[REPEATED] += int((~new).sum())
            yield list(compress(chunk, new))


class JudgedQueries:
    """The queries of the split that cross-validation shares out, and those of other splits: none may be in both."""

    def __init__(self, folds: CrossValidation) -> None:
        self._split = folds.split
        self._queries = {True: DigestSet(), False: DigestSet()}  # of the split, of others

    def add(self, chunk: list[JudgmentRecord]) -> None:
        """Raises ``UserError`` for a query that is in both."""
        for is_shared_out, queries in self._queries.items():
            records = [record for record in chunk if (record.split == self._split) == is_shared_out]
            ids = [record.query_id for record in records]
            queries.add(ids)
            for record in compress(records, self._queries[not is_shared_out].contain(ids)):
                raise UserError(
                    f"{record.place} judges query {record.query_id!r} in split '{record.split}', and it is judged in"
                    f" {'another split' if is_shared_out else f'split {self._split!r}'} too. cross_validation shares"
                    f" out the queries of '{self._split}', so one that is tested could be trained on too. Read split"
                    f" '{self._split}' alone (splits: [{self._split}], where the kind has that setting), or take the"
                    " query out of the other split."
                )


Identified = TypeVar("Identified", DocumentRecord, QueryRecord)
Row = tuple[Any, ...]

_UNKNOWN = "judgments_of_unknown_"
_EMPTY = "judgments_of_empty_"


class _Ids:
    """Ids of all records of one part, and of those that were left out as empty."""

    def __init__(self) -> None:
        self.all = DigestSet()
        self.empty = DigestSet()
        self.repeated = 0  # records left out because they came before


class CheckedSource:
    """Any ``Format`` as record batches of a collection's schemas, by the ``Policies`` of its settings.

    Ids are unique; every judgment names a document and a query of the collection, each pair once a split. ``facts``:
    what the manifest is to say of the input; ``counts``, and ``dropped``, reason to number, are complete once all was
    read. Streams: what stays in memory is eight bytes for each id and each judged pair. Judgments need the ids, so read
    ``documents`` and ``queries`` to their ends before. ``name``: of one of several sources of a collection, which its
    ids begin with, and the domain of what has none. Raises ``UserError`` with file and line for whatever the policies
    don't allow; at once where they ask for cross-validation of no judgments.
    """

    def __init__(self, format_: Format, policies: Policies) -> None:
        self.name = ""
        self._format = format_
        self._policies = policies
        self._documents, self._queries = _Ids(), _Ids()
        self.facts, self.counts = format_.facts, format_.counts
        self.dropped: dict[str, int] = {}
        if policies.cross_validation and not format_.judgments_name:
            raise UserError(
                f"cross_validation shares out judged queries, but with {format_.documents_name} no judgments are read."
                " Give them too, or leave cross_validation out."
            )

    def fingerprint(self) -> dict[str, Any]:
        """What the format says of its input."""
        return self._format.fingerprint()

    def documents(self) -> Iterator[pa.RecordBatch]:
        """The documents in the format's order."""
        return self._batches(self._document_rows(), DOCUMENTS)

    def queries(self) -> Iterator[pa.RecordBatch]:
        """The queries in the format's order, those without a judgment too."""
        return self._batches(self._query_rows(), QUERIES)

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """The judgments in the format's order, positives first where it repeats; scores of zero and below are kept."""
        return self._batches(self._judgment_rows(), JUDGMENTS)

    def _batches(self, rows: Iterator[Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in record_batches(rows, schema):
            columns = dict(zip(schema.names, batch.columns, strict=True))
            for ids in columns.keys() & {"id", "query_id", "document_id"} if self.name else ():
                columns[ids] = pc.binary_join_element_wise(f"{self.name}/", columns[ids], "")
            if self.name and "domain" in columns:
                columns["domain"] = pc.if_else(pc.equal(columns["domain"], ""), self.name, columns["domain"])
            yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    def _document_rows(self) -> Iterator[Row]:
        ids = self._documents = _Ids()
        records = self._distinct(self._format.documents, ids, _passage)
        for record in self._leave_out_empty(records, ids, "documents", _passage):
            yield record.id, record.title, record.text, record.domain
        self._finish(ids, "documents")
        self.dropped |= self._format.left_out
        if ids.repeated and not self._format.judgments_name:  # training sets repeat by nature, a corpus does not
            self.dropped["repeated_documents"] = ids.repeated

    def _query_rows(self) -> Iterator[Row]:
        ids = self._queries = _Ids()
        records = self._distinct(self._format.queries, ids, _question)
        for record in self._leave_out_empty(records, ids, "queries", _question):
            yield record.id, record.text, record.domain, list(record.answers)
        if self._format.judgments_name or len(ids.all):
            self._finish(ids, "queries")

    def _distinct(
        self, read: Callable[[], Iterator[Identified]], ids: _Ids, text: Callable[[Identified], str]
    ) -> Iterator[Identified]:
        texts = DigestSet()  # an id may come again where the format repeats records, with another text it may not
        for chunk in in_chunks(read()):
            new = ids.all.add([record.id for record in chunk])
            wrong = ~new
            if self._format.repeats:
                wrong &= texts.add([f"{len(record.id)} {record.id}{text(record)}" for record in chunk])
            if wrong.any():
                repeated = next(compress(chunk, wrong))
                earlier = _earlier(read, repeated, lambda record: record.id)
                other = " with another text" if self._format.repeats else ""
                raise UserError(
                    f"{repeated.place}: id {repeated.id!r} is already that of {earlier}{other}. Ids must be unique:"
                    " drop one of the two, or give it another id."
                )
            ids.repeated += int((~new).sum())
            yield from compress(chunk, new)

    def _leave_out_empty(
        self,
        records: Iterable[Any],
        ids: _Ids,
        part: Literal["documents", "queries"],
        text: Callable[[Any], str],
    ) -> Iterator[Any]:
        setting = f"empty_{part}"
        for record in records:
            if text(record):
                yield record
                continue
            if getattr(self._policies, setting) == "refuse":
                lacks = "has neither title nor text" if part == "documents" else "has no text"
                what = "document" if part == "documents" else "query"
                raise UserError(
                    f"{record.place}: {what} {record.id!r} {lacks}. Give it a text, or set {setting} to 'drop' to leave"
                    " all such records and their judgments out."
                )
            ids.empty.add([record.id])

    def _finish(self, ids: _Ids, part: Literal["documents", "queries"]) -> None:
        if len(ids.all) == len(ids.empty):
            name = self._format.documents_name if part == "documents" else self._format.queries_name
            raise UserError(f"{name} holds no {part} with a text. Is it the right file, is it complete?")
        if len(ids.empty):
            self.dropped[f"empty_{part}"] = len(ids.empty)

    def _judgment_rows(self) -> Iterator[Row]:
        if not self._format.judgments_name:
            return
        left_out, kept = Counter[str](), 0
        folds, splits = self._policies.cross_validation, set[str]()
        judged_queries = JudgedQueries(folds) if folds else None
        first_unknown: JudgmentRecord | None = None
        repeats = self._format.repeats
        judged = distinct_judgments(self._format.judgments, left_out) if repeats else self._unrepeated_judgments()
        for chunk in judged:
            reasons = _reasons(chunk, self._documents, self._queries)
            if judged_queries:
                usable = [record for record, reason in zip(chunk, reasons, strict=True) if not reason]
                judged_queries.add(usable)
            for record, reason in zip(chunk, reasons, strict=True):
                if not reason:
                    kept += 1
                    split = folds.split_of(record.query_id, record.split) if folds else record.split
                    splits.add(record.split)
                    yield record.query_id, record.document_id, record.relevance, split
                    continue
                left_out[reason] += 1
                if reason.startswith(_UNKNOWN) and first_unknown is None:
                    first_unknown = record
        if first_unknown and self._policies.unknown_ids == "refuse":
            self._refuse_unknown(first_unknown, left_out)
        left_out = +left_out
        if not kept:
            counted = ", ".join(f"{reason} {number}" for reason, number in sorted(left_out.items()))
            raise UserError(
                f"No judgments to keep in {self._format.judgments_name}: {left_out.total()} were left out"
                f" ({counted or 'there are none'}). Are these the right files?"
            )
        if folds and folds.split not in splits:
            raise UserError(
                f"cross_validation.split is '{folds.split}', but {self._format.judgments_name} has no judgments of it."
                f" Splits there: {', '.join(sorted(splits))}."
            )
        self.dropped.update(left_out)

    def _unrepeated_judgments(self) -> Iterator[list[JudgmentRecord]]:
        """Raises ``UserError`` for a pair that is judged again."""
        pairs = DigestSet()
        for chunk in in_chunks(self._format.judgments()):
            new = pairs.add([judged_pair(record) for record in chunk])
            if not new.all():
                repeated = next(compress(chunk, ~new))
                raise UserError(
                    f"{repeated.place} judges query {repeated.query_id!r} and document {repeated.document_id!r}, as"
                    f" {_earlier(self._format.judgments, repeated, judged_pair)} does. Keep one of the two."
                )
            yield chunk

    def _refuse_unknown(self, first: JudgmentRecord, left_out: Counter[str]) -> None:
        is_document = bool(self._queries.all.contain([first.query_id])[0])
        name = self._format.documents_name if is_document else self._format.queries_name
        id_ = first.document_id if is_document else first.query_id
        raise UserError(
            f"{first.place} names {id_!r}, which {name} does not hold; in all, {left_out[_UNKNOWN + 'documents']}"
            f" judgments name unknown documents and {left_out[_UNKNOWN + 'queries']} unknown queries. Complete the"
            " files, or set unknown_ids to 'drop' to leave these judgments out."
        )


def _passage(record: DocumentRecord) -> str:
    return passage_text(record.title, record.text)


def _question(record: QueryRecord) -> str:
    return record.text.strip()


def _earlier(read: Callable[[], Iterator[Any]], repeated: Any, key: Callable[[Any], str]) -> str:
    """Where the record with the key of ``repeated`` was read first, for a message."""
    first = next(record for record in read() if key(record) == key(repeated))
    if first == repeated:
        raise UserError(
            f"{repeated.place}: {key(repeated)!r} has the same 64-bit digest as another id, so it would be taken for"
            " that one. Rename it."
        )
    return f"{first.place.unit} {first.place.line}" if first.place.file == repeated.place.file else str(first.place)


def _reasons(chunk: list[JudgmentRecord], documents: _Ids, queries: _Ids) -> list[str]:
    """Why each judgment can't be kept; '' where it can."""
    reasons = [""] * len(chunk)
    for part, ids, of_part in (
        ("documents", documents, [record.document_id for record in chunk]),
        ("queries", queries, [record.query_id for record in chunk]),
    ):
        known, empty = ids.all.contain(of_part), ids.empty.contain(of_part)
        for place, (is_known, is_empty) in enumerate(zip(known, empty, strict=True)):
            if not is_known:
                reasons[place] = _UNKNOWN + part
            elif is_empty:
                reasons[place] = _EMPTY + part
    return reasons
