"""A collection as an artifact: documents, queries and judgments in parquet, rows addressed by their number."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.collection import passage_text
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.long_columns import places_among

COLLECTION = "collection"
Part = Literal["documents", "queries", "judgments"]
TextPart = Literal["documents", "queries"]
_MOST_OPEN_FILES = 64


class ParquetRows:
    """Rows of several parquet files under one numbering, read by row group.

    A process may have a thousand files open, a collection more: those asked for last stay open.
    """

    def __init__(self, artifact: Artifact, names: Sequence[str]) -> None:
        self._paths = [artifact.path(name) for name in names]
        footers = [pq.read_metadata(path) for path in self._paths]
        self._file = lru_cache(_MOST_OPEN_FILES)(partial(_opened, self._paths, footers))
        starts = [0]
        self._groups: list[tuple[int, int]] = []
        for number, footer in enumerate(footers):
            for group in range(footer.num_row_groups):
                self._groups.append((number, group))
                starts.append(starts[-1] + footer.row_group(group).num_rows)
        self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Row group after row group, in order."""
        for number, group in self._groups:
            yield self._file(number).read_row_group(group, columns=list(columns))

    def read(self, columns: Sequence[str]) -> pa.Table:
        """All rows of these columns."""
        return pa.concat_tables(self._file(number).read(columns=list(columns)) for number in range(len(self._paths)))

    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """The given rows in the given order (repeats allowed); only the row groups that hold one are read."""
        distinct, place = np.unique(rows, return_inverse=True)
        group_of = np.searchsorted(self._starts, distinct, side="right") - 1
        pieces = []
        for group in np.unique(group_of):
            number, inner = self._groups[group]
            table = self._file(number).read_row_group(inner, columns=list(columns))
            pieces.append(table.take(pa.array(distinct[group_of == group] - self._starts[group])))
        if not pieces:
            return self._file(0).schema_arrow.empty_table().select(list(columns))
        return pa.concat_tables(pieces).take(pa.array(place))


def _opened(paths: Sequence[Path], footers: Sequence[pq.FileMetaData], number: int) -> pq.ParquetFile:
    return pq.ParquetFile(paths[number], metadata=footers[number])


class StoredCollection(Artifact):
    """Opens a collection artifact. Row numbers follow the order in which the source gave documents and queries."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, COLLECTION)

    def rows_of(self, part: Part) -> ParquetRows:
        """The rows of documents, queries or judgments."""
        return ParquetRows(self, self.names(f"{part}/"))

    def count(self, part: Part) -> int:
        """Number of rows, from the manifest alone."""
        return int(self.manifest["counts"].get(part, 0))

    def texts(self, part: TextPart, rows: NDArray[np.int64], *, with_title: bool = True) -> list[str]:
        """What an encoder reads: a query's text; a document's title and text, or its text alone."""
        return texts_of(self.rows_of(part).take(rows, text_columns(part)), part, with_title=with_title)

    def query_rows(self, ids: Sequence[str] | pa.ChunkedArray) -> NDArray[np.int64]:
        """The row of each query id. Raises ``UserError`` naming the first that is not there."""
        column = ids if isinstance(ids, pa.ChunkedArray) else pa.array(ids, pa.string())
        rows = places_among(column, self.rows_of("queries").read(["id"])["id"])
        if (rows < 0).any():
            missing = column[int(np.argmax(rows < 0))].as_py()
            raise UserError(f"{self.uri} has no query {missing!r}. Do both come from the same collection?")
        return rows

    def answers(self) -> dict[str, list[str]]:
        """Strings that answer each query, for those that have some."""
        table = self.rows_of("queries").read(["id", "answers"])
        found = zip(table["id"].to_pylist(), table["answers"].to_pylist(), strict=True)
        return {query: answers for query, answers in found if answers}

    def judgments(self, split: str) -> pa.Table:
        """The judgments of one split. Raises ``UserError`` naming the splits there are."""
        table = self.rows_of("judgments").read(["query_id", "document_id", "relevance", "split"])
        chosen = table.filter(pc.equal(table["split"], split))
        if not len(chosen):
            splits = ", ".join(sorted(set(table["split"].to_pylist()))) or "none"
            raise UserError(f"{self.uri} has no judgments of split '{split}'. Splits there: {splits}.")
        return chosen


def text_columns(part: TextPart) -> list[str]:
    """The columns that ``texts_of`` needs."""
    return ["title", "text"] if part == "documents" else ["text"]


def texts_of(table: pa.Table, part: TextPart, *, with_title: bool = True) -> list[str]:
    """What an encoder reads of each row; a document without a text is its title in either case."""
    texts: list[str] = table["text"].to_pylist()
    if part == "queries":
        return texts
    if not with_title:
        return [text.strip() or title.strip() for title, text in zip(table["title"].to_pylist(), texts, strict=True)]
    return [passage_text(title, text) for title, text in zip(table["title"].to_pylist(), texts, strict=True)]
