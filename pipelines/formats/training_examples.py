"""Training sets as collections: what their formats share.

Such a set is a list of examples, each a query with documents that answer it and documents that don't, their texts
written out in every example that uses them.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.mining.candidates import StoredCandidates
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.collection import Part, StoredCollection
from retrieval.collections.digests import DigestSet
from retrieval.collections.records import (
    DocumentRecord,
    JudgmentRecord,
    Place,
    QueryRecord,
    describe_files,
)
from retrieval.collections.text_lines import find_files

POSITIVE, HARD_NEGATIVE, RANDOM_NEGATIVE = 1, 0, -1

Record = TypeVar("Record", DocumentRecord, QueryRecord)

_RECORDS_AT_ONCE = 1024


class Example(NamedTuple):
    """A query of a split, the documents written out with it, and its judgments: document id and relevance."""

    query: QueryRecord
    split: str
    documents: Sequence[DocumentRecord]
    judged: Sequence[tuple[str, int]]


class ExampleFormat(ABC):
    """Training examples as a ``records.Format``; subclasses read the examples of their files.

    Files are read once each for documents and queries and twice for judgments; nothing is kept in between.
    """

    repeats = True

    def __init__(self, folder: Folder, files: Mapping[str, Sequence[str]]) -> None:
        """``files``: the names of each split's files in the folder, as ``files_of_splits`` finds them."""
        self.folder = folder
        self.files = files
        self.judgments_name = ", ".join(folder.describe(name) for names in self.files.values() for name in names)
        self.documents_name = self.queries_name = self.judgments_name

    @abstractmethod
    def examples(self) -> Iterator[Example]:
        """The examples, by split."""

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents of every example, repeated as there."""
        for example in self.examples():
            yield from example.documents

    def queries(self) -> Iterator[QueryRecord]:
        """The query of every example."""
        for example in self.examples():
            yield example.query

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """What every example says of its documents; None where there are no files of examples."""
        return self._judgments() if self.files else None

    def _judgments(self) -> Iterator[JudgmentRecord]:
        for example in self.examples():
            for document, relevance in example.judged:
                yield JudgmentRecord(example.query.place, example.query.id, document, relevance, example.split)

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        return describe_files([(self.folder, name) for names in self.files.values() for name in names])


def files_of_splits(folder: Folder, names: Mapping[str, Sequence[str]], setting: str) -> dict[str, list[str]]:
    """The files that are there of each split. Raises ``UserError``, naming the setting, where one is not."""
    return {split: find_files(folder, of_split, f"{setting}.{split}") for split, of_split in sorted(names.items())}


def example_of(query: QueryRecord, split: str, documents: Sequence[tuple[DocumentRecord, int]]) -> Example:
    """An example whose documents are all written out, each with its relevance."""
    judged = [(document.id, relevance) for document, relevance in documents]
    return Example(query, split, [document for document, _ in documents], judged)


def texts(value: Any, key: str, place: Place) -> list[str]:
    """A list of strings; none where there is null. Raises ``UserError`` for something else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a list of strings.')
    return value


def objects(value: Any, key: str, place: Place) -> list[dict[str, Any]]:
    """A list of JSON objects; none where there is null. Raises ``UserError`` for something else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a list of objects with a "text" each.')
    return value


def first_of_each_id(records: Iterable[Record]) -> Iterator[Record]:
    """Leaves out what repeats an id, whether its text is the same or not; keeps eight bytes for each id."""
    seen = DigestSet()
    remaining = iter(records)
    while chunk := list(islice(remaining, _RECORDS_AT_ONCE)):
        yield from compress(chunk, seen.add([record.id for record in chunk]))


# Mined candidates as the hard negatives of training examples.


class MinedNegatives(Mapping[str, list[str]]):
    """Query id to the ids of its candidates in their order, without those judged relevant; read-only.

    In memory are the ids of all lists, as Arrow strings.
    """

    def __init__(self, candidates: StoredCandidates) -> None:
        columns = ["query_id", "document_ids", "relevance"]
        table = pa.concat_tables(candidates.tables(columns)).combine_chunks()
        self._documents, self._relevance = table["document_ids"], table["relevance"]
        self.minimum_relevance = candidates.minimum_relevance
        self._rows = {query: row for row, query in enumerate(table["query_id"].to_pylist())}

    def __getitem__(self, query: str) -> list[str]:
        row = self._rows[query]
        relevance = self._relevance[row].values
        kept = pc.fill_null(pc.less(relevance, self.minimum_relevance), True)  # null: not judged
        documents: list[str] = self._documents[row].values.filter(kept).to_pylist()
        return documents

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


# Rows of a stored collection in its order, a row group at a time.


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


Document = dict[str, str]
"""``id``, ``title`` and ``text``."""

_QUERIES_AT_ONCE = 1024
_DOCUMENTS_AT_ONCE = 1024
_DOCUMENT_COLUMNS = ["id", "title", "text"]


class TrainingExample(NamedTuple):
    """A query with its positives (relevance above 0, the highest first), hard negatives (0) and others (below 0)."""

    query_id: str
    query: str
    answers: list[str]
    positives: list[Document]
    hard_negatives: list[Document]
    other_negatives: list[Document]


class TrainingExamples:
    """The split's queries that have a positive, in the collection's order.

    ``hard_negatives``: query id to ids of its hard negatives, in order; they replace all negatives that the split
    judges, and a query that isn't there has none. Raises ``UserError`` where no query has a positive, where one of them
    names a document that is not there, or a positive of its query, and where the split can't be a file's name.

    In memory are ids and row numbers of what is judged, not the texts: iterating copies the documents that are needed
    to a temporary file in ``scratch``, in one pass over the collection, and maps it.
    """

    def __init__(
        self,
        collection: StoredCollection,
        split: str,
        hard_negatives: Mapping[str, Sequence[str]] | None,
        scratch: Path,
    ) -> None:
        self._collection = collection
        self._scratch = scratch
        require_name(split, collection)
        judged = collection.judgments(split)
        # candidates say from which grade on a document was no negative for them
        minimum = getattr(hard_negatives, "minimum_relevance", 1)
        positives = judged.filter(pc.greater_equal(judged["relevance"], minimum))
        if not len(positives):
            raise UserError(f"{collection.uri}: no query of split '{split}' has a positive, so there are no examples.")
        if hard_negatives is not None:
            judged = _with_hard_negatives(positives.drop_columns("split"), hard_negatives)
        relevance = judged["relevance"].to_numpy()
        query_rows = collection.find("queries", judged["query_id"])
        document_rows = collection.find("documents", judged["document_id"])
        if hard_negatives is not None:
            _check_listed(judged, relevance, query_rows, document_rows)
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

    def hard_negative_counts(self) -> NDArray[np.int64]:
        """How many hard negatives each query has, (queries,)."""
        return np.add.reduceat(self._relevance == 0, self._bounds[:-1], dtype=np.int64)

    def __iter__(self) -> Iterator[TrainingExample]:
        queries = self._collection.rows_of("queries")
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            documents = _MappedDocuments(self._collection, self._documents, Path(folder) / "documents.arrow")
            for first in range(0, len(self._queries), _QUERIES_AT_ONCE):
                rows = self._queries[first : first + _QUERIES_AT_ONCE]
                for number, query in enumerate(queries.take(rows, ["id", "text", "answers"]).to_pylist(), start=first):
                    yield self._example(query, slice(self._bounds[number], self._bounds[number + 1]), documents)

    def _example(self, query: dict[str, Any], judged: slice, documents: "_MappedDocuments") -> TrainingExample:
        relevance, numbers = self._relevance[judged], self._numbers[judged]
        positives, hard_negatives, others = (
            [documents[number] for number in numbers[chosen].tolist()]
            for chosen in (relevance > 0, relevance == 0, relevance < 0)
        )
        return TrainingExample(query["id"], query["text"], query["answers"], positives, hard_negatives, others)


class _MappedDocuments:
    """Chosen documents by their number, in a file that is mapped into memory."""

    def __init__(self, collection: StoredCollection, rows: NDArray[np.int64], path: Path) -> None:
        """``rows`` ascend, so that each row group is read for the first of its documents and decoded at most twice."""
        documents = collection.rows_of("documents")
        schema = pa.schema([(name, pa.string()) for name in _DOCUMENT_COLUMNS])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for first in range(0, len(rows), _DOCUMENTS_AT_ONCE):
                block = documents.take(rows[first : first + _DOCUMENTS_AT_ONCE], _DOCUMENT_COLUMNS)
                writer.write_batch(block.cast(schema).combine_chunks().to_batches()[0])
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            self._blocks = [reader.get_batch(number) for number in range(reader.num_record_batches)]

    def __getitem__(self, number: int) -> Document:
        block, place = divmod(number, _DOCUMENTS_AT_ONCE)
        columns = self._blocks[block].columns
        return {name: column[place].as_py() for name, column in zip(_DOCUMENT_COLUMNS, columns, strict=True)}


def _with_hard_negatives(positives: pa.Table, hard_negatives: Mapping[str, Sequence[str]]) -> pa.Table:
    """The positives, then the hard negatives of their queries as judgments of 0."""
    tables = [positives]
    queries = positives["query_id"].unique()
    for first in range(0, len(queries), _QUERIES_AT_ONCE):
        block = queries[first : first + _QUERIES_AT_ONCE]
        lists = [hard_negatives.get(query, ()) for query in block.to_pylist()]
        documents = pa.array(chain.from_iterable(lists), pa.string())
        numbers = np.repeat(np.arange(len(lists)), [len(listed) for listed in lists])
        columns = {
            "query_id": block.take(pa.array(numbers)),
            "document_id": documents,
            "relevance": np.zeros(len(documents), dtype=np.int32),
        }
        tables.append(pa.table(columns, positives.schema))
    return pa.concat_tables(tables)


def _check_listed(
    judged: pa.Table,
    relevance: NDArray[np.int32],
    query_rows: NDArray[np.int64],
    document_rows: NDArray[np.int64],
) -> None:
    """Refuses listed hard negatives that are not in the collection, or are positives of their query."""
    pairs = query_rows * (document_rows.max() + 1) + document_rows
    positive = (relevance == 0) & np.isin(pairs, pairs[relevance > 0])
    unknown = document_rows < 0
    if not (positive | unknown).any():
        return
    place = int(np.argmax(positive | unknown))
    query, document = judged["query_id"][place].as_py(), judged["document_id"][place].as_py()
    raise UserError(
        f"hard_negatives: document {document!r} of query {query!r} is "
        + (
            "not in the collection. Were they mined in another one?"
            if unknown[place]
            else "one of its positives. Leave the positives of a query out of its hard negatives."
        )
    )
