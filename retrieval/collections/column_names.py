"""Settings that say which tables hold a collection, and what their columns are called."""

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from raytriever.retrieval.collections.records import Policies
from raytriever.retrieval.collections.text_lines import FileNames
from raytriever.retrieval.configuration import Settings


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
