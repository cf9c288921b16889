"""Collections from tables, with columns named by the settings: JSON lines, CSV, TSV, parquet.

Either documents, optionally with queries and judgments, or pairs, rows with the texts themselves.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.tables import FileTables
from raytriever.artifacts.storage import Folder
from raytriever.settings.configuration import Settings
from retrieval.collections.records import (
    PART_END,
    DocumentRecord,
    FolderSource,
    Format,
    JudgmentRecord,
    QueryRecord,
    Record,
    Source,
    text_id,
)
from retrieval.collections.text_lines import FileNames


class DocumentTable(Settings):
    """The table of the documents. A title, text or domain of null is an empty one."""

    table: FileNames = Field(min_length=1)
    """The table."""
    id: str | None = "id"
    """Column of the ids. null: ids are made from title and text, so equal texts are one document."""
    title: str | None = None
    """Column of the titles. null: no titles."""
    text: str = "text"
    """Column of the texts."""
    in_parts: bool = False
    """Whether each text is a list of strings, which raytriever chunk with kind parts can separate again."""
    domain: str | None = None
    """Column of the domains."""
    join_by: str | None = None
    """Join neighbouring rows with the same value in this column into one document. It has the first row's id, and texts
    are joined by a space."""

    def _check(self) -> None:
        if self.join_by is not None and self.id is None:
            raise ValueError("join_by takes the id of the first row; name the column of the ids")


class QueryTable(Settings):
    """The table of the queries."""

    table: FileNames = Field(min_length=1)
    """The table."""
    id: str = "id"
    """Column of the ids."""
    text: str = "text"
    """Column of the texts."""
    domain: str | None = None
    """Column of the domains."""
    answers: str | None = None
    """Column with a string, or a list of strings, that answers the query."""


class SplitTables(Settings):
    """The rows of splits: a table for each split, or one table with a column that names it."""

    splits: dict[str, FileNames] | None = Field(default=None, min_length=1)
    """The table of each split."""
    table: FileNames | None = Field(default=None, min_length=1)
    """The table of all splits."""
    split: str | None = None
    """The column of ``table`` with each row's split. null: all rows are for training."""

    def _check(self) -> None:
        if self.splits is None and self.table is None:
            raise ValueError(
                "the table is missing. Give table, or splits with a table for each, such as {train: …, test: …}"
            )
        if self.splits is not None and (self.table is not None or self.split is not None):
            raise ValueError("splits excludes table and split. Give splits, or table and maybe split")

    def tables(self) -> Iterator[tuple[str | None, FileNames]]:
        """Each split, by name, and its table; None where a column tells the split."""
        if self.table is None:
            yield from sorted((self.splits or {}).items())
        else:
            yield None if self.split else "train", self.table


class JudgmentTables(SplitTables):
    """The tables of the judgments."""

    query_id: str = "query_id"
    """Column of the queries' ids."""
    document_id: str = "document_id"
    """Column of the documents' ids."""
    relevance: str | None = "relevance"
    """Column of the grades. null: every row is a positive, of grade 1."""


class PairTables(SplitTables):
    """Tables with a query's and a document's text in every row; equal texts are one query, one document."""

    query: str = "query"
    """Column of the queries' texts."""
    document: str = "document"
    """Column of the documents' texts. Each text of a list is a positive."""
    title: str | None = None
    """Column of the documents' titles."""
    relevance: str | None = None
    """Column of the grades. None: every row is a positive, of grade 1."""
    negatives: tuple[str, ...] = ()
    """Columns with a text, or a list of texts, that is not relevant. null for none."""
    domain: str | None = None
    """Column with the domain of the query and of the document. __file__: the file's name without extensions."""

    def _check(self) -> None:
        super()._check()
        if self.title is not None and self.negatives:
            raise ValueError(
                "negatives are texts without a title, so a title would tell positives from them. Put titles into the"
                " texts, or leave title out"
            )


class ColumnFiles(FolderSource):
    """Settings of a collection in files with named columns, below one folder: local, in an object store or on the hub.

    Documents, with queries and judgments where there are some, or else pairs. A table is a file, a folder or a glob
    below ``path``, or a list of these.
    """

    kind: Literal["columns"] = "columns"
    """The format."""
    documents: DocumentTable | None = None
    """The documents."""
    queries: QueryTable | None = None
    """The queries."""
    judgments: JudgmentTables | None = None
    """The judgments."""
    pairs: PairTables | None = None
    """Pairs, instead of documents, queries and judgments."""
    domain: str | None = Field(default=None, min_length=1)
    """Domain of documents and queries without one."""
    quotes: bool | None = None
    """For .tsv files. true: fields may be enclosed in quotes. false: a quote is part of the text. null: ambiguous
    quotes are refused."""

    def _check(self) -> None:
        separate = [name for name in ("documents", "queries", "judgments") if getattr(self, name) is not None]
        if self.pairs is not None and separate:
            raise ValueError(f"pairs hold queries, documents and judgments already; leave out {', '.join(separate)}")
        if self.pairs is None and self.documents is None:
            raise ValueError("documents are missing. Give documents and maybe queries and judgments, or give pairs")
        if self.judgments is not None and self.queries is None:
            raise ValueError("judgments need queries; give their table")
        made = self.documents is not None and (self.documents.id is None or self.documents.join_by is not None)
        if self.judgments is not None and made:
            raise ValueError(
                "judgments name documents by the ids of their rows: give documents.id, and leave documents.join_by out"
            )

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a table is missing."""
        tables = FileTables(Folder(self.path), quotes=self.quotes)
        format_ = PairsFormat(self.pairs, tables, self.domain or "") if self.pairs else ColumnsFormat(self, tables)
        return Source(format_, self)


class ColumnsFormat(Format):
    """Documents, queries and judgments in tables of their own."""

    def __init__(self, columns: ColumnFiles, tables: FileTables) -> None:
        assert columns.documents is not None
        super().__init__(tables.folder, tables.opened)
        self.repeats = columns.documents.id is None
        self.in_pieces = columns.documents.join_by is None
        self.cut_endings += () if tables.quotes else (".tsv",)
        self._columns = columns
        self._document_columns = columns.documents
        self._documents = tables.open(columns.documents.table)
        self._queries = tables.open(columns.queries.table) if columns.queries else None
        splits = columns.judgments.tables() if columns.judgments else ()
        self._judgments = [(split, tables.open(names)) for split, names in splits]
        self.documents_name = self._documents.name
        self.queries_name = self._queries.name if self._queries else ""
        self.judgments_name = ", ".join(table.name for _, table in self._judgments)

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents in their table's order."""
        names = self._document_columns
        ids = [] if names.id is None else [names.id]
        rows = self._documents.rows(ids, [names.text, names.title, names.domain, names.join_by])
        for _, joined in groupby(rows, self._join_key):
            yield _joined(self._document(row) for row in joined)

    def _join_key(self, row: Record) -> Any:
        """The value to join a row by. An empty value joins nothing, but 0 is not empty."""
        value = row.values.get(str(self._document_columns.join_by)) if self._document_columns.join_by else None
        return object() if value in (None, "") else value

    def _document(self, row: Record) -> DocumentRecord:
        names = self._document_columns
        title, domain = row.text(names.title), row.text(names.domain)
        text = PART_END.join(row.strings(names.text)) if names.in_parts else row.text(names.text)
        id_ = text_id(title, text) if names.id is None else row.id(names.id)
        return DocumentRecord(row.place, id_, title, text, domain or self._columns.domain or "")

    def queries(self) -> Iterator[QueryRecord]:
        """The queries in their table's order."""
        names = self._columns.queries
        if names is None or self._queries is None:
            return
        for row in self._queries.rows([names.id, names.text], [names.domain, names.answers]):
            domain = row.text(names.domain) or self._columns.domain or ""
            answers = tuple(row.strings(names.answers, or_one=True))
            yield QueryRecord(row.place, row.id(names.id), row.text(names.text), domain, answers)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments, by split where each has its table; none of a bare corpus."""
        names = self._columns.judgments
        if names is None:
            return
        for split, table in self._judgments:
            for row in table.rows([names.query_id, names.document_id], [names.relevance, names.split]):
                query, document = row.id(names.query_id), row.id(names.document_id)
                relevance = row.grade(names.relevance)
                yield JudgmentRecord(row.place, query, document, relevance, split or row.id(str(names.split)))


class PairsFormat(Format):
    """Rows with a query, a document and maybe negatives, all as texts.

    Ids are hashes of the texts, and of the domain if a column has one. So an equal text in the same domain is the same
    query or document.
    """

    repeats = True

    def __init__(self, columns: PairTables, tables: FileTables, domain: str = "") -> None:
        super().__init__(tables.folder, tables.opened)
        self._columns = columns
        self._domain = domain  # of rows without one
        self._splits = [(split, tables.open(names)) for split, names in columns.tables()]
        self.judgments_name = ", ".join(table.name for _, table in self._splits)
        self.documents_name = self.queries_name = self.judgments_name

    def documents(self) -> Iterator[DocumentRecord]:
        """Each row's documents, then its negatives."""
        names = self._columns
        for _, table in self._splits:
            for row in table.rows([names.document], [names.title, names.domain, *names.negatives]):
                domain = row.text(names.domain) or self._domain
                for title, text, _ in self._documents_of(row):
                    yield DocumentRecord(row.place, self._id(row, title, text), title, text, domain)

    def queries(self) -> Iterator[QueryRecord]:
        """Each row's query."""
        names = self._columns
        for _, table in self._splits:
            for row in table.rows([names.query], [names.domain]):
                text = row.text(names.query)
                yield QueryRecord(row.place, self._id(row, text), text, row.text(names.domain) or self._domain)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """Each row's documents with its relevance, then its negatives with 0."""
        names = self._columns
        optional = [names.title, names.domain, names.relevance, names.split, *names.negatives]
        for split, table in self._splits:
            for row in table.rows([names.query, names.document], optional):
                of_row = split or row.id(str(names.split))
                query, relevance = self._id(row, row.text(names.query)), row.grade(names.relevance)
                for title, text, is_positive in self._documents_of(row):
                    grade = relevance if is_positive else 0
                    yield JudgmentRecord(row.place, query, self._id(row, title, text), grade, of_row)

    def _documents_of(self, row: Record) -> Iterator[tuple[str, str, bool]]:
        """Title and text of each document, then of the negatives; whether it is no negative."""
        title, column = row.text(self._columns.title), self._columns.document
        for text in row.strings(column) if isinstance(row.values[column], list) else [row.text(column)]:
            yield title, text, True
        for column in self._columns.negatives:
            yield from (("", text, False) for text in row.strings(column, or_one=True) if text)

    def _id(self, row: Record, *texts: str) -> str:
        domain = self._columns.domain
        return text_id(row.text(domain), *texts) if domain else text_id(*texts)


def _joined(records: Iterator[DocumentRecord]) -> DocumentRecord:
    """One document of several: the first, with the texts of all."""
    first = next(records)
    return first._replace(text=" ".join([first.text, *(record.text for record in records)]))
