"""Training sets as collections: what their formats share.

Such a set is a list of examples, each a query with documents that answer it and documents that don't, their texts
written out in every example that uses them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple, TypeVar

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
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
