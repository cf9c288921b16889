"""What a collection is: documents, queries and judgments, whatever format they came in."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.long_columns import places_among
from raytriever.errors import UserError, require_strings


def schema_of(**types: pa.DataType) -> pa.Schema:
    """Columns of these names and types, never null."""
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])


DOCUMENTS = schema_of(id=pa.string(), title=pa.string(), text=pa.string(), domain=pa.string())
QUERIES = schema_of(id=pa.string(), text=pa.string(), domain=pa.string(), answers=pa.list_(pa.string()))
JUDGMENTS = schema_of(query_id=pa.string(), document_id=pa.string(), relevance=pa.int32(), split=pa.string())

COLLECTION = "collection"  # the artifact: documents, queries and judgments in parquet
OWN_QUESTIONS = "own questions"  # the fact "tested_on": of a query's answers, passages of some documents, one is enough
Part = Literal["documents", "queries", "judgments"]
TextPart = Literal["documents", "queries"]

SCHEMAS: dict[Part, pa.Schema] = {"documents": DOCUMENTS, "queries": QUERIES, "judgments": JUDGMENTS}

_MOST_OPEN_FILES = 64
_GROUPS_AT_ONCE = 8
_BATCH_ROWS = 8192
_BATCH_CHARACTERS = 16 << 20  # at most 64 MiB of UTF-8, far below the 2 GiB that a string column can hold


def passage_text(title: str, text: str) -> str:
    """Title and text as the one string that is encoded and indexed, joined as BEIR does."""
    return f"{title} {text}".strip()


def record_batches(
    rows: Iterable[tuple[Any, ...]], schema: pa.Schema, most_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Gathers rows, their values in the schema's order, into batches bounded in rows and characters."""
    pending: list[tuple[Any, ...]] = []
    characters = 0
    for row in rows:
        pending.append(row)
        characters += sum(len(value) for value in row if isinstance(value, str))
        if len(pending) == (most_rows or _BATCH_ROWS) or characters >= _BATCH_CHARACTERS:
            yield _record_batch(pending, schema)
            pending, characters = [], 0
    if pending:
        yield _record_batch(pending, schema)


def _record_batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class ParquetRows:
    """Rows of several parquet files under one numbering, read by row group.

    A file is opened (and copied from an object store) when one of its rows is asked for. The last ones stay open,
    because a process may have a thousand open, and a collection has more. ``counts`` are the rows of each file. None
    reads them from all files. Raises ``UserError`` where a file has another number of rows.
    """

    def __init__(self, artifact: Artifact, names: Sequence[str], counts: Sequence[int] | None = None) -> None:
        def read_footer(file: int) -> pq.FileMetaData:
            found = pq.read_metadata(artifact.path(names[file]))
            if counts and found.num_rows != counts[file]:
                raise UserError(
                    f"{artifact.folder.describe(names[file])} has {found.num_rows:,} rows, but its manifest says"
                    f" {counts[file]:,}: the artifact was not made as a whole. Make it again."
                )
            return found

        def open_file(file: int) -> pq.ParquetFile:
            return pq.ParquetFile(artifact.path(names[file]), metadata=footer(file))

        def read_group_starts(file: int) -> NDArray[np.int64]:
            found = footer(file)
            return np.cumsum([0, *(found.row_group(group).num_rows for group in range(found.num_row_groups))])

        self._footer = footer = cache(read_footer)
        self._group_starts = cache(read_group_starts)
        self._file = lru_cache(_MOST_OPEN_FILES)(open_file)
        self._files = range(len(names))
        self._starts = np.cumsum([0, *(counts or [footer(file).num_rows for file in self._files])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def tables(self, columns: Sequence[str], groups: slice = slice(None)) -> Iterator[pa.Table]:
        """Row group after row group, in order. ``groups`` selects some, counted over all files."""
        all_groups = ((file, group) for file in self._files for group in range(self._footer(file).num_row_groups))
        for file, group in islice(all_groups, groups.start, groups.stop):
            yield self._file(file).read_row_group(group, columns=list(columns))

    def read(self, columns: Sequence[str]) -> pa.Table:
        """All rows of these columns."""
        return pa.concat_tables(self._file(file).read(columns=list(columns)) for file in self._files)

    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """The given rows in the given order (repeats allowed); only the row groups that hold one are read."""
        distinct, place = np.unique(rows, return_inverse=True)
        pieces = list[pa.Table]()
        bounds = np.searchsorted(distinct, self._starts)
        for file in np.flatnonzero(np.diff(bounds)).tolist():
            of_file = distinct[bounds[file] : bounds[file + 1]] - self._starts[file]
            pieces += self._take_ascending(file, of_file, list(columns))
        if not pieces:
            return self._file(0).schema_arrow.empty_table().select(list(columns))
        return pa.concat_tables(pieces).take(pa.array(place))

    def _take_ascending(self, file: int, rows: NDArray[np.int64], columns: list[str]) -> Iterator[pa.Table]:
        """Some row groups are read by one call, because each call costs as much as some hundred rows."""
        starts = self._group_starts(file)
        groups = np.unique(np.searchsorted(starts, rows, side="right") - 1).tolist()
        for begin in range(0, len(groups), _GROUPS_AT_ONCE):
            some = groups[begin : begin + _GROUPS_AT_ONCE]
            table = self._file(file).read_row_groups(some, columns)
            held = np.concatenate([np.arange(*starts[group : group + 2].tolist()) for group in some])
            first, end = np.searchsorted(rows, [held[0], held[-1] + 1])
            yield table.take(pa.array(np.searchsorted(held, rows[first:end])))


class StoredCollection(Artifact):
    """Opens a collection artifact. Row numbers follow the source's order of documents and queries."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, COLLECTION)

    def rows_of(self, part: Part) -> ParquetRows:
        """The rows of documents, queries or judgments."""
        files = ((file.name, shard) for shard in self.shards for file in shard.files)
        found = {name: shard.counts.get(part, -1) for name, shard in files if name.startswith(f"{part}/")}
        # the files' where a shard has one of each part, as all jobs write
        are_counted = sum(found.values()) == self.count(part)
        return ParquetRows(self, [*found], [*found.values()] if are_counted else None)

    def count(self, part: Part) -> int:
        """Number of rows, from the manifest alone."""
        return int(self.manifest["counts"].get(part, 0))

    def id_of(self, part: TextPart, row: int) -> str:
        """The id of a row."""
        return str(self.rows_of(part).take(np.array([row]), ["id"])["id"][0].as_py())

    def texts(self, part: TextPart, rows: NDArray[np.int64], *, with_title: bool = True) -> list[str]:
        """Texts for an encoder: a query's text, or a document's title and text, or its text alone."""
        return texts_of(self.rows_of(part).take(rows, text_columns(part)), part, with_title=with_title)

    def find(self, part: TextPart, ids: Sequence[str] | pa.ChunkedArray) -> NDArray[np.int64]:
        """The row of each id (n,), -1 if the collection lacks it.

        The collection's ids are read in one pass, in blocks of about as many as are looked for. Memory is one row group
        and what is asked for.
        """
        column = _column_of(ids).cast(pa.large_string())  # of more than 2 GiB too
        wanted = column.unique()
        row_of = np.full(len(wanted), -1)
        start = 0
        for block in self._id_blocks(part, len(wanted)):
            places = pc.index_in(block, value_set=wanted)
            row_of[places.drop_null().to_numpy()] = start + np.flatnonzero(places.is_valid())
            start += len(block)
        rows: NDArray[np.int64] = row_of[pc.index_in(column, value_set=wanted).to_numpy()]
        return rows

    def _id_blocks(self, part: TextPart, rows: int) -> Iterator[pa.ChunkedArray]:
        """All ids, in blocks of at least ``rows``."""
        waiting: list[pa.Array] = []
        for table in self.rows_of(part).tables(["id"]):
            waiting += table["id"].cast(pa.large_string()).chunks
            if sum(map(len, waiting)) >= rows:
                yield pa.chunked_array(waiting, pa.large_string())
                waiting = []
        yield pa.chunked_array(waiting, pa.large_string())

    def require(self, part: TextPart, ids: Sequence[str] | pa.ChunkedArray) -> NDArray[np.int64]:
        """The row of each id (n,). Raises ``UserError`` with the number of those not there, and the first of them."""
        ids = _column_of(ids)
        rows = self.find(part, ids)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            first = ids[int(absent[0])].as_py()
            raise UserError(
                f"{len(absent):,} of {len(rows):,} {part} are not in {self.uri}, such as {first!r}. Does it belong"
                " to another collection, or are its ids written in another way?"
            )
        return rows

    def answers(self) -> dict[str, list[str]]:
        """Strings that answer each query, for those that have some."""
        table = self.rows_of("queries").read(["id", "answers"])
        found = zip(table["id"].to_pylist(), table["answers"].to_pylist(), strict=True)
        return {query: answers for query, answers in found if answers}

    def queries_of(self, split: str | None, domain: str | None = None) -> NDArray[np.int64]:
        """Rows of the queries that the split judges (None: of all) in the domain (None: in any), ascending.

        Raises ``UserError`` for a split without judgments and a domain without queries, naming those there are.
        """
        table = self.rows_of("queries").read(["id", "domain"])
        chosen = np.ones(len(table), dtype=np.bool_)
        if split is not None:
            chosen &= places_among(table["id"], self.judgments(split)["query_id"]) >= 0
        if domain is not None:
            of_domain = pc.equal(table["domain"], domain).to_numpy(zero_copy_only=False)
            if not of_domain.any():
                there = ", ".join(map(repr, sorted(table["domain"].unique().to_pylist())))
                raise UserError(f"{self.uri} has no query of domain '{domain}'. Set 'domain' to one of {there}.")
            chosen &= of_domain
            if not chosen.any():
                raise UserError(f"Split '{split}' of {self.uri} judges no query of domain '{domain}'. Set one to null.")
        return np.flatnonzero(chosen)

    def judgments(self, split: str) -> pa.Table:
        """The judgments of one split. Raises ``UserError`` naming the splits there are."""
        table = self.rows_of("judgments").read(["query_id", "document_id", "relevance", "split"])
        chosen = table.filter(pc.equal(table["split"], split))
        if not len(chosen):
            self.require_split(split)
        return chosen

    def require_split(self, split: str) -> None:
        """Raises ``UserError`` naming the splits there are where this one is not judged; reads as far as needed."""
        splits = set[str]()
        for table in self.rows_of("judgments").tables(["split"]):
            splits.update(table["split"].unique().to_pylist())
            if split in splits:
                return
        there = (
            f"{', '.join(sorted(splits))}. Set 'split' to one of them, or have collect hold some out (new_splits: {{}})"
            if splits
            else "none"
        )
        raise UserError(f"{self.uri} has no judgments of split '{split}'. Splits there: {there}.")


def text_columns(part: TextPart) -> list[str]:
    """The columns that ``texts_of`` needs."""
    return ["title", "text"] if part == "documents" else ["text"]


def _column_of(ids: Sequence[str] | pa.ChunkedArray) -> pa.ChunkedArray:
    return ids if isinstance(ids, pa.ChunkedArray) else pa.chunked_array([require_strings("ids", ids)], pa.string())


def texts_of(table: pa.Table, part: TextPart, *, with_title: bool = True) -> list[str]:
    """The text of each row for an encoder. A document without a text is its title in either case."""
    texts: list[str] = table["text"].to_pylist()
    if part == "queries":
        return texts
    titled = zip(table["title"].to_pylist(), texts, strict=True)
    if with_title:
        return [passage_text(title, text) for title, text in titled]
    return [text.strip() or title.strip() for title, text in titled]
