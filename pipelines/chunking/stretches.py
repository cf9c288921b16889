"""The documents to be chunked: stretches of a stored collection."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from retrieval.collections.collection import StoredCollection


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
        with pq.ParquetFile(collection.open(name)) as file:
            for group in range(file.metadata.num_row_groups):
                if size >= bytes_at_least and file.metadata.row_group(group).num_rows:
                    firsts.append(Place(number, group))
                    size = 0
                size += file.metadata.row_group(group).total_byte_size
    return [Stretch(first, stop) for first, stop in zip(firsts, [*firsts[1:], None], strict=True)]


def tables_of(collection: StoredCollection, stretch: Stretch, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The row groups of a stretch, in order; a file is opened when its turn comes."""
    names = collection.names("documents/")
    for number in range(stretch.first.file, len(names)):
        with pq.ParquetFile(collection.path(names[number])) as file:
            for group in range(file.metadata.num_row_groups):
                if stretch.stop is not None and (number, group) >= stretch.stop:
                    return
                if (number, group) >= stretch.first:
                    yield file.read_row_group(group, columns=list(columns))
