"""Training sets: a query with documents that answer it and documents that don't, how they are read and written.

Their formats write the texts out in every example that uses them; a collection holds each once.
"""

import json
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.tables import FileTable
from pipelines.mapped_rows import MappedRows, write_mapped_rows
from pipelines.mining.candidates import Negatives
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.collection import Part, StoredCollection, passage_text
from retrieval.collections.records import (
    NOTHING,
    DocumentRecord,
    Format,
    JudgmentRecord,
    QueryRecord,
    Record,
    stretch_of,
)
from retrieval.collections.text_lines import find_files, json_records

POSITIVE, HARD_NEGATIVE, RANDOM_NEGATIVE = 1, 0, -1


class Example(NamedTuple):
    """A query, the documents written out with it, and its judgments: document id and relevance."""

    query: QueryRecord
    documents: Sequence[DocumentRecord]
    judged: Sequence[tuple[str, int]]


class ExampleFormat(Format):
    """Training examples as a collection, of JSON (lines or one list) or parquet; subclasses say what a record is.

    Files are read once each for documents, queries and judgments; nothing is kept in between.
    """

    repeats = True

    def __init__(self, folder: Folder, examples: Sequence[tuple[str, str]], others: Sequence[str] = ()) -> None:
        """``examples``: split and name of each file in the folder. ``others``: files that are read before them."""
        self.example_files = sorted(examples, key=itemgetter(0))
        names = [name for _, name in self.example_files]
        super().__init__(folder, [*others, *names])
        self.documents_name = self.queries_name = self.judgments_name = self.describe(names)

    def records(self, name: str) -> Iterator[Record]:
        """The lines, entries or rows of a file."""
        if stretch_of(name) == NOTHING:
            return iter(())
        if name.endswith(".parquet"):
            table = FileTable(self.folder, [name])
            return table.rows(table.columns())
        return json_records(self.folder, name)

    @abstractmethod
    def example(self, record: Record) -> Example:
        """The example of a record."""

    def other_documents(self) -> Iterator[DocumentRecord]:
        """Documents that are read before those of the examples."""
        return iter(())

    def other_queries(self) -> Iterator[QueryRecord]:
        """Queries that are read before those of the examples."""
        return iter(())

    def examples(self) -> Iterator[tuple[str, Example]]:
        """The examples and their splits, by split, then in the order of its files."""
        for split, name in self.example_files:
            yield from ((split, self.example(record)) for record in self.records(name))

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents of every example, repeated as there, behind the others."""
        of_examples = chain.from_iterable(example.documents for _, example in self.examples())
        return chain(self.other_documents(), of_examples)

    def queries(self) -> Iterator[QueryRecord]:
        """The query of every example, behind the others."""
        return chain(self.other_queries(), (example.query for _, example in self.examples()))

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments in every example."""
        for split, (query, _, judged) in self.examples():
            for document, relevance in judged:
                yield JudgmentRecord(query.place, query.id, document, relevance, split)


def split_files(folder: Folder, files: Mapping[str, Sequence[str]], setting: str) -> list[tuple[str, str]]:
    """Split and name of each file. Raises ``UserError``, naming the setting, where one is not there."""
    return [(split, name) for split, names in files.items() for name in find_files(folder, names, f"{setting}.{split}")]


def example_of(query: QueryRecord, documents: Sequence[tuple[DocumentRecord, int]]) -> Example:
    """An example with all its documents written out, each with its relevance."""
    judged = [(document.id, relevance) for document, relevance in documents]
    return Example(query, [document for document, _ in documents], judged)


def rows(collection: StoredCollection, part: Part, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, row by row."""
    for table in collection.rows_of(part).tables(columns):
        yield from zip(*(table[column].to_pylist() for column in columns), strict=True)


def splits_of(collection: StoredCollection) -> list[str]:
    """The splits that there are judgments of, sorted."""
    return sorted({split for (split,) in rows(collection, "judgments", "split")})


def judgments_of(collection: StoredCollection, split: str) -> Iterator[tuple[str, str, int]]:
    """Query id, document id and relevance of each of the split's judgments, in stored order."""
    for of_split, *judged in rows(collection, "judgments", "split", "query_id", "document_id", "relevance"):
        if of_split == split:
            yield tuple(judged)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes lines of UTF-8, each with its end."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes a record a line."""
    write_lines(path, (json.dumps(record, ensure_ascii=False) for record in records))


def require_name(split: str, collection: StoredCollection) -> None:
    """Raises ``UserError`` where a split can't be part of a file's name."""
    if not split or split.startswith(".") or set(split) & set("/\\\0") or len(split.encode()) > 200:
        raise UserError(
            f"{collection.uri}: the split {split!r:.80} can't be the name of a file. Rename it in the source (no /, no"
            " \\, no dot in front, at most 200 bytes) and collect again."
        )


Document = dict[str, str]
"""``id``, ``title`` and ``text``."""


def text_of(document: Document) -> str:
    """Title and text in one string, for formats without titles."""
    return passage_text(document["title"], document["text"])


_QUERIES_AT_ONCE = 128  # their documents are in memory together
_DOCUMENTS_AT_ONCE = 1024
_DOCUMENTS = pa.schema([(name, pa.string()) for name in ("id", "title", "text")])


class TrainingExample(NamedTuple):
    """A query with its positives (relevance above 0, the highest first) and hard negatives (0)."""

    query_id: str
    query: str
    positives: list[Document]
    hard_negatives: list[Document]


class TrainingExamples:
    """The split's queries that have a positive, in the collection's order.

    ``mined``: hard negatives of queries. They replace all negatives that the split judges, and a query without an entry
    has none. ``minimum_relevance``: lowest grade of a document that answers its query. Raises ``UserError`` if no query
    has a positive, a query's positive doesn't exist, or the split can't be a file's name.

    Memory holds ids and row numbers of judged texts, not the texts. Iterating copies the needed documents to a
    temporary file in ``scratch``, in one pass over the collection, and maps it.
    """

    def __init__(
        self,
        collection: StoredCollection,
        split: str,
        mined: Iterable[Negatives] | None,
        scratch: Path,
        minimum_relevance: int = 1,
    ) -> None:
        self.collection = collection
        self.split = split
        self._scratch = scratch
        require_name(split, collection)
        judged = collection.judgments(split)
        positives = judged.filter(pc.greater_equal(judged["relevance"], minimum_relevance))
        if not len(positives):
            raise UserError(f"{collection.uri}: no query of split '{split}' has a positive, so there are no examples.")
        judged = judged if mined is None else positives
        relevance = judged["relevance"].to_numpy()
        query_rows = collection.require("queries", judged["query_id"])
        document_rows = collection.require("documents", judged["document_id"])
        found = list(mined or ())
        query_rows = np.concatenate([query_rows, *(queries for queries, _ in found)])
        document_rows = np.concatenate([document_rows, *(documents for _, documents in found)])
        relevance = np.append(relevance, np.zeros(len(query_rows) - len(relevance), relevance.dtype))
        with_positive = np.isin(query_rows, query_rows[relevance > 0])
        order = np.lexsort((-relevance, query_rows))  # stable, so equal grades stay in the order they are listed in
        order = order[with_positive[order]]
        self._relevance = relevance[order]
        self._queries, starts = np.unique(query_rows[order], return_index=True)
        self._bounds = np.append(starts, len(order))
        # row of each document that is needed, and number among these of each that is judged
        self._documents, self._numbers = np.unique(document_rows[order], return_inverse=True)

    def __len__(self) -> int:
        return len(self._queries)

    def __iter__(self) -> Iterator[TrainingExample]:
        queries, total = self.collection.rows_of("queries"), len(self._queries)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            path = Path(folder) / "documents.arrow"
            write_mapped_rows(path, _DOCUMENTS, self._document_tables())
            documents = MappedRows([path])
            for first in range(0, total, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, total)
                block = slice(self._bounds[first], self._bounds[last])
                found = documents.take(self._numbers[block]).to_pylist()
                judged = zip(self._relevance[block].tolist(), found, strict=True)
                asked = queries.take(self._queries[first:last], ["id", "text"]).to_pylist()
                for query, number in zip(asked, np.diff(self._bounds[first : last + 1]).tolist(), strict=True):
                    yield _example(query, list(islice(judged, number)))

    def _document_tables(self) -> Iterator[pa.Table]:
        """The needed documents. Their rows ascend, so that each row group is decoded at most twice."""
        documents = self.collection.rows_of("documents")
        for first in range(0, len(self._documents), _DOCUMENTS_AT_ONCE):
            yield documents.take(self._documents[first : first + _DOCUMENTS_AT_ONCE], _DOCUMENTS.names)


def _example(query: dict[str, Any], judged: Sequence[tuple[int, Document]]) -> TrainingExample:
    """``judged``: the documents with their relevance, the highest first."""
    positives = [document for relevance, document in judged if relevance > 0]
    hard_negatives = [document for relevance, document in judged if relevance == 0]
    return TrainingExample(query["id"], query["text"], positives, hard_negatives)
