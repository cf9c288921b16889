"""Collections out of tables whose columns the settings name: JSON lines, CSV, TSV, parquet.

Either documents, and with them queries and judgments where there are some; or pairs, rows with the texts themselves.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipelines.formats.json_records import identifier_of
from pipelines.formats.tables import FileTables, Row, Tables
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import (
    DocumentRecord,
    Format,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    text_id,
)
from retrieval.collections.text_lines import FileNames

# Settings that say which tables hold a collection, and what their columns are called.


class DocumentTable(Settings):
    """The table of the documents. A title, text or domain of null is an empty one."""

    table: FileNames = Field(min_length=1)
    id: str | None = "id"  # None: made from title and text, so that equal texts are one document
    title: str | None = None  # None: they have none
    text: str = "text"
    domain: str | None = None
    # a column: neighbouring rows with the same value in it are one document, with the id of the first; the rows' texts
    # are joined by a space (passages of 100 words, as wikipedia-nq-corpus has them, by title)
    join_by: str | None = None

    @model_validator(mode="after")
    def _check_join(self) -> Self:
        if self.join_by is not None and self.id is None:
            raise ValueError("join_by takes the id of the first row; name the column of the ids")
        return self


class QueryTable(Settings):
    """The table of the queries."""

    table: FileNames = Field(min_length=1)
    id: str = "id"
    text: str = "text"
    domain: str | None = None
    answers: str | None = None  # a column with a string, or a list of strings


class SplitTables(Settings):
    """Where rows are that belong to splits: a table for each split, or one table with a column that names it."""

    splits: dict[str, FileNames] | None = Field(default=None, min_length=1)  # split to its table
    table: FileNames | None = Field(default=None, min_length=1)
    split: str | None = None  # the column of ``table``

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if self.splits is None and (self.table is None or self.split is None):
            raise ValueError(
                "the splits are missing; give splits (train: …, test: …), or table and split, the column that names"
                " each row's split"
            )
        if self.splits is not None and (self.table is not None or self.split is not None):
            raise ValueError("splits and table exclude each other, as do splits and split; give one of them")
        return self

    def tables(self) -> Iterator[tuple[str | None, FileNames]]:
        """Each split, by name, and its table; None where a column tells the split."""
        if self.splits is not None:
            yield from sorted(self.splits.items())
        else:
            assert self.table is not None
            yield None, self.table


class JudgmentTables(SplitTables):
    """The tables of the judgments."""

    query_id: str = "query_id"
    document_id: str = "document_id"
    relevance: str | None = "relevance"  # None: every row is a positive, of grade 1


class PairTables(SplitTables):
    """Tables with a query's and a document's text in every row; equal texts are one query, one document."""

    query: str = "query"
    document: str = "document"
    title: str | None = None  # the document's
    relevance: str | None = None  # None: every row is a positive, of grade 1
    negatives: tuple[str, ...] = ()  # columns with a text or a list of texts that are not relevant; null for none
    domain: str | None = None  # of the query and of the document


class Columns(Policies):
    """Documents, with queries and judgments where there are some, or else pairs."""

    documents: DocumentTable | None = None
    queries: QueryTable | None = None
    judgments: JudgmentTables | None = None
    pairs: PairTables | None = None
    domain: str | None = Field(default=None, min_length=1)  # of documents and queries that have none of their own

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        self._check_given()
        return self

    def _check_given(self) -> None:
        separate = [name for name in ("documents", "queries", "judgments") if getattr(self, name) is not None]
        if self.pairs is not None and separate:
            raise ValueError(f"pairs hold queries, documents and judgments already; leave out {', '.join(separate)}")
        if self.pairs is None and self.documents is None:
            raise ValueError("documents are missing; give documents and maybe queries and judgments, or give pairs")
        if self.judgments is not None and self.queries is None:
            raise ValueError("judgments need queries; give their table")
        made = self.documents is not None and (self.documents.id is None or self.documents.join_by is not None)
        if self.judgments is not None and made:
            raise ValueError(
                "judgments name documents by the ids of their rows; give documents.id, and leave documents.join_by out"
            )


_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,10}(\.0*)?")
_LONGEST_JOINED = 64 << 20  # characters of one document: the wrong column must not gather a whole corpus
_INT32 = range(-(2**31), 2**31)


class ColumnFiles(Columns):
    """Settings of a collection in files with named columns, below one folder, local or in an object store.

    A table is a file, a folder or a glob below ``path``, or a list of these.
    """

    kind: Literal["columns"] = "columns"
    path: InputPath
    # of .tsv files: true, fields may stand between quotes; false, a quote is a character; null, refused where in doubt
    quotes: bool | None = None

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a table is missing."""
        return CheckedSource(format_of(self, FileTables(Folder(self.path), quotes=self.quotes)), self)


def format_of(columns: Columns, tables: Tables) -> Format:
    """The collection whose columns are these, in whatever the tables are."""
    return PairsFormat(columns.pairs, tables, columns.domain or "") if columns.pairs else ColumnsFormat(columns, tables)


class ColumnsFormat:
    """Documents, queries and judgments in tables of their own; a ``records.Format``."""

    def __init__(self, columns: Columns, tables: Tables) -> None:
        assert columns.documents is not None
        self.repeats = columns.documents.id is None
        self._columns = columns
        self._tables = tables
        self._documents = tables.open(columns.documents.table)
        self._queries = tables.open(columns.queries.table) if columns.queries else None
        splits = columns.judgments.tables() if columns.judgments else ()
        self._judgments = [(split, tables.open(names)) for split, names in splits]
        self.documents_name = self._documents.name
        self.queries_name = self._queries.name if self._queries else ""
        self.judgments_name = ", ".join(table.name for _, table in self._judgments)

    def fingerprint(self) -> dict[str, Any]:
        """What the tables say of themselves."""
        return self._tables.fingerprint()

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents in their table's order."""
        assert self._columns.documents is not None
        if self._columns.documents.join_by is None:
            yield from (record for record, _ in self._document_rows())
            return
        # an empty value joins nothing; 0 is none
        for _, rows in groupby(self._document_rows(), lambda row: object() if row[1] in (None, "") else row[1]):
            yield _joined(record for record, _ in rows)

    def _document_rows(self) -> Iterator[tuple[DocumentRecord, Any]]:
        """Each row's document and what it is joined by."""
        names = self._columns.documents
        assert names is not None
        # ids that are made need no column: the text's stands in
        columns = [names.id or names.text, names.text]
        for place, (id_, *texts, key) in self._documents.rows(columns, [names.title, names.domain, names.join_by]):
            text, title, domain = (
                _text(value, column, place)
                for value, column in zip(texts, (names.text, names.title, names.domain), strict=True)
            )
            id_ = text_id(title, text) if names.id is None else identifier_of(id_, names.id, place)
            yield DocumentRecord(place, id_, title, text, domain or self._columns.domain or ""), key

    def queries(self) -> Iterator[QueryRecord]:
        """The queries in their table's order."""
        names = self._columns.queries
        if names is None or self._queries is None:
            return
        rows = self._queries.rows([names.id, names.text], [names.domain, names.answers])
        for place, (id_, text, domain, answers) in rows:
            yield QueryRecord(
                place,
                identifier_of(id_, names.id, place),
                _text(text, names.text, place),
                _text(domain, names.domain, place) or self._columns.domain or "",
                tuple(_texts(answers, names.answers, place)),
            )

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """The judgments, by split where each has its table; None for a bare corpus."""
        return self._read_judgments() if self._columns.judgments else None

    def _read_judgments(self) -> Iterator[JudgmentRecord]:
        names = self._columns.judgments
        assert names is not None
        for split, table in self._judgments:
            rows = table.rows([names.query_id, names.document_id], [names.relevance, names.split])
            for place, (query, document, relevance, named_split) in rows:
                yield JudgmentRecord(
                    place,
                    identifier_of(query, names.query_id, place),
                    identifier_of(document, names.document_id, place),
                    _grade(relevance, names.relevance, place),
                    split or identifier_of(named_split, str(names.split), place),
                )


class PairsFormat:
    """Rows with a query, a document and maybe negatives, all as texts; a ``records.Format``.

    Ids are hashes of the texts, and of the domain where a column has one: a text that comes again in its domain is the
    same query or document.
    """

    repeats = True

    def __init__(self, columns: PairTables, tables: Tables, domain: str = "") -> None:
        self._columns = columns
        self._domain = domain  # of rows without one
        self._tables = tables
        self._splits = [(split, tables.open(names)) for split, names in columns.tables()]
        self.documents_name = self.queries_name = self.judgments_name = ", ".join(
            table.name for _, table in self._splits
        )

    def fingerprint(self) -> dict[str, Any]:
        """What the tables say of themselves."""
        return self._tables.fingerprint()

    def documents(self) -> Iterator[DocumentRecord]:
        """Each row's document, then its negatives."""
        names = self._columns
        for _, (place, (document, title, domain, *negatives)) in self._rows(
            [names.document], [names.title, names.domain, *names.negatives]
        ):
            title, domain = _text(title, names.title, place), _text(domain, names.domain, place)
            text = _text(document, names.document, place)
            shown = domain or self._domain
            yield DocumentRecord(place, self._id(domain, title, text), title, text, shown)
            for negative in self._negatives(negatives, place):
                yield DocumentRecord(place, self._id(domain, "", negative), "", negative, shown)

    def queries(self) -> Iterator[QueryRecord]:
        """Each row's query."""
        names = self._columns
        for _, (place, (query, domain)) in self._rows([names.query], [names.domain]):
            text, domain = _text(query, names.query, place), _text(domain, names.domain, place)
            yield QueryRecord(place, self._id(domain, text), text, domain or self._domain)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """Each row's document with its relevance, then its negatives with 0."""
        names = self._columns
        optional = [names.title, names.domain, names.relevance, names.split, *names.negatives]
        for split, (place, values) in self._rows([names.query, names.document], optional):
            query, document, title, domain, relevance, named_split, *negatives = values
            split = split or identifier_of(named_split, str(names.split), place)
            domain = _text(domain, names.domain, place)
            query_id = self._id(domain, _text(query, names.query, place))
            document_id = self._id(domain, _text(title, names.title, place), _text(document, names.document, place))
            yield JudgmentRecord(place, query_id, document_id, _grade(relevance, names.relevance, place), split)
            for negative in self._negatives(negatives, place):
                yield JudgmentRecord(place, query_id, self._id(domain, "", negative), 0, split)

    def _id(self, domain: str, *texts: str) -> str:
        return text_id(domain, *texts) if self._columns.domain else text_id(*texts)

    def _rows(self, required: Sequence[str], optional: Sequence[str | None]) -> Iterator[tuple[str | None, Row]]:
        for split, table in self._splits:
            yield from ((split, row) for row in table.rows(required, optional))

    def _negatives(self, values: Sequence[Any], place: Place) -> Iterator[str]:
        for column, value in zip(self._columns.negatives, values, strict=True):
            yield from filter(None, _texts(value, column, place))


def _joined(records: Iterator[DocumentRecord]) -> DocumentRecord:
    """One document of several: the first, with the texts of all."""
    first = next(records)
    texts, characters = [first.text], len(first.text)
    for record in records:
        texts.append(record.text)
        characters += len(record.text)
        if characters > _LONGEST_JOINED:
            raise UserError(
                f"{record.place}: the rows from {first.place.unit} {first.place.line} on are one document by join_by,"
                f" and it has more than {_LONGEST_JOINED:,} characters by now. Is that the column that tells documents"
                " apart?"
            )
    return first._replace(text=" ".join(texts))


def _text(value: Any, column: str | None, place: Place) -> str:
    """A cell's string, '' for null. Raises ``UserError`` where it is something else."""
    if value is not None and not isinstance(value, str):
        raise UserError(f'{place}: "{column}" is {value!r:.60}. It must be a string.')
    return value or ""


def _texts(value: Any, column: str | None, place: Place) -> list[str]:
    """A cell's strings: a list of them, one, or none for null. Raises ``UserError`` where it is something else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, str) for item in values):
        raise UserError(f'{place}: "{column}" is {value!r:.60}. It must be a string or a list of strings.')
    return values


def _grade(value: Any, column: str | None, place: Place) -> int:
    """A cell's grade, 1 where no column has it. Raises ``UserError`` where it is no whole number of 32 bits."""
    if column is None:
        return 1
    number = float(value) if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or number not in _INT32:
        raise UserError(
            f'{place}: "{column}" is {value!r:.60}. A relevance must be an integer of 32 bits, above 0 where the'
            " document is relevant; where every row is a positive, set relevance to null."
        )
    return int(number)
