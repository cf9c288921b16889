"""The documents to be chunked: stretches of a stored collection, passages of one title joined again if asked for."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.collections.digests import DigestSet

JOINER = " "
_COLUMNS = ("id", "title", "text", "domain")
_LONGEST_JOINED = 64 << 20  # characters


class SourceDocument(NamedTuple):
    """A document as the collection has it, or passages that were joined."""

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


def articles_of(collection: StoredCollection, stretch: Stretch) -> Iterator[SourceDocument]:
    """The passages that begin in a stretch, those of one title and domain after one another joined to one document.

    The document's id is that of its first passage. Passages are in the order of their ids where all of these are whole
    numbers, else in the collection's. A title whose passages go on behind the stretch is read to its end; one that
    began before it is left to the stretch before. Passages without a title stay as they are. Raises ``UserError`` for a
    title of more text than one document may be.
    """
    begun = _last_title(collection, stretch.first)
    for key, group in groupby(_with_rest(collection, stretch), key=lambda read: _article(read[1])):
        is_begun, begun = key == begun, None
        if is_begun:
            continue
        passages = iter(group)
        is_inside, first = next(passages)
        if not is_inside:
            return
        yield _joined([first, *_bounded(passage for _, passage in passages)])


def titles_that_come_again(collection: StoredCollection) -> int:
    """How many times a title (with its domain) begins anew after passages of others."""
    seen, again = DigestSet(), 0
    last = None
    for name in collection.names("documents/"):
        with pq.ParquetFile(collection.folder.open_input(name)) as file:
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=["title", "domain"])
                begun = []
                for key in zip(table["title"].to_pylist(), table["domain"].to_pylist(), strict=True):
                    if key != last and key[0]:
                        begun.append(f"{len(key[0])} {key[0]}{key[1]}")
                    last = key
                again += int((~seen.add(begun)).sum()) if begun else 0
    return again


def _article(document: SourceDocument) -> tuple[str, str]:
    """What is equal for passages of one article."""
    return (document.title, document.domain) if document.title else ("", document.id)


def _with_rest(collection: StoredCollection, stretch: Stretch) -> Iterator[tuple[bool, SourceDocument]]:
    """The documents from the start of a stretch to the collection's end, each with whether it is in the stretch."""
    for place, documents in _groups(collection, stretch.first):
        is_inside = stretch.stop is None or place < stretch.stop
        yield from ((is_inside, document) for document in documents)


def _bounded(passages: Iterable[SourceDocument]) -> Iterator[SourceDocument]:
    characters = 0
    for passage in passages:
        characters += len(passage.text)
        if characters > _LONGEST_JOINED:
            raise UserError(
                f"join_titles: passages titled {passage.title!r} up to {passage.id!r} hold more than"
                f" {_LONGEST_JOINED:,} characters, too many for one document. Is the title that of an article? If not,"
                " set join_titles to false."
            )
        yield passage


def _joined(passages: list[SourceDocument]) -> SourceDocument:
    if all(passage.id.isascii() and passage.id.isdigit() for passage in passages):
        passages = sorted(passages, key=lambda passage: int(passage.id))
    texts = [passage.text for passage in passages if passage.text.strip()]
    return passages[0]._replace(text=JOINER.join(texts))


def _last_title(collection: StoredCollection, place: Place) -> tuple[str, str] | None:
    """Title and domain of the document right before a row group; None where there is no such."""
    names = collection.names("documents/")
    for number in range(place.file, -1, -1):
        with pq.ParquetFile(collection.path(names[number])) as file:
            groups = place.group if number == place.file else file.metadata.num_row_groups
            for group in range(groups - 1, -1, -1):
                table = file.read_row_group(group, columns=["title", "domain"])
                if len(table):
                    title: str = table["title"][-1].as_py()
                    return (title, table["domain"][-1].as_py()) if title else None
    return None


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
