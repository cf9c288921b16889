"""The documents to be chunked: stretches of a stored collection."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection

_COLUMNS = ("id", "title", "text", "domain")


class SourceDocument(NamedTuple):
    """A document as the collection has it."""

    id: str
    title: str
    text: str
    domain: str


class Place(NamedTuple):
    """A row group: the number of the file among those of the documents, and the group's in the file."""

    file: int
    group: int


class Stretch(NamedTuple):
    """Row groups one after the other, from ``first`` up to ``stop``; ``stop`` is None for the last stretch."""

    first: Place
    stop: Place | None


def stretches(collection: StoredCollection, bytes_at_least: float) -> list[Stretch]:
    """The documents in stretches of at least so many bytes (uncompressed) but for the last; never none."""
    firsts, size = [Place(0, 0)], 0
    for number, name in enumerate(collection.names("documents/")):
        with pq.ParquetFile(collection.folder.open_input(name)) as file:
            for group in range(file.metadata.num_row_groups):
                if size >= bytes_at_least and file.metadata.row_group(group).num_rows:
                    firsts.append(Place(number, group))
                    size = 0
                size += file.metadata.row_group(group).total_byte_size
    return [Stretch(first, stop) for first, stop in zip(firsts, [*firsts[1:], None], strict=True)]


def documents_of(collection: StoredCollection, stretch: Stretch) -> Iterator[SourceDocument]:
    """The documents of a stretch, in order. Raises ``UserError`` for text that is no UTF-8."""
    for place, documents in _groups(collection, stretch.first):
        if stretch.stop is not None and place >= stretch.stop:
            return
        yield from documents


def _groups(collection: StoredCollection, first: Place) -> Iterator[tuple[Place, Iterator[SourceDocument]]]:
    """Row group after row group from ``first`` on; a file is opened when its turn comes."""
    names = collection.names("documents/")
    for number in range(first.file, len(names)):
        with pq.ParquetFile(collection.path(names[number])) as file:
            start = first.group if number == first.file else 0
            row = sum(file.metadata.row_group(group).num_rows for group in range(start))
            for group in range(start, file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=list(_COLUMNS))
                yield Place(number, group), _documents(table, collection.folder.describe(names[number]), row)
                row += len(table)


def _documents(table: pa.Table, file: str, first_row: int) -> Iterator[SourceDocument]:
    columns = [table[name] for name in _COLUMNS]
    for row in range(len(table)):
        try:
            values: list[Any] = [column[row].as_py() for column in columns]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}, row {first_row + row + 1} is not UTF-8 ({error.reason}). Collect the source again."
            ) from error
        yield SourceDocument(*values)
