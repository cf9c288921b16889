"""The contract between batch construction and training: batches stored as data.

One row is one example, one row group is one batch, so batch i is one seek. Files are
``epoch=<epoch>/batches-<number>.parquet``. Every epoch has its own batches and its own masks. Rows that all epochs
share are stored once, in ``lookup/rows-<number>.arrow``. The rows of an epoch's batches are then
``lookup/order-<epoch>.npy``, int64 (batches, batch_size).

The manifest's fact ``layout`` tells what a row is; ``LAYOUTS`` has the columns of each layout. Schemas, the card of
published batches and what hard negatives carry along follow from it. A new column needs a line there, the code that
fills it, and the code that reads it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mapped_rows import MappedRows
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.table import counted

BATCHES = "batches"
Layout = Literal["pairs", "chunks", "candidates"]


@dataclass(frozen=True)
class BatchColumn:
    """A column, never null (entries of a list may be), and its ``meaning`` in the words of a dataset's card.

    ``fact``: store it only if the artifact's manifest has this fact. None: always. ``per_negative``: a list with an
    entry for each hard negative of the row.
    """

    name: str
    type: pa.DataType
    meaning: str
    fact: str | None = None
    per_negative: bool = False


@dataclass(frozen=True)
class BatchLayout:
    """The meaning of a row in a sentence, and its columns in stored order."""

    meaning: str
    columns: tuple[BatchColumn, ...]

    def schema(self, facts: Mapping[str, Any] = MappingProxyType({})) -> pa.Schema:
        """The columns of batches with these ``facts`` in their manifest."""
        stored = (column for column in self.columns if column.fact is None or facts.get(column.fact))
        return pa.schema([pa.field(column.name, column.type, nullable=False) for column in stored])

    @property
    def per_negative(self) -> tuple[str, ...]:
        """The columns with an entry for each hard negative, which are drawn and left out with it."""
        return tuple(column.name for column in self.columns if column.per_negative)


_STRINGS, _INTEGERS, _FLOATS = pa.list_(pa.string()), pa.list_(pa.int32()), pa.list_(pa.float32())
_QUERY_ID = BatchColumn("query_id", pa.string(), "id of the query")
_QUERY = BatchColumn("query", pa.string(), "text of the query")
_DOCUMENT_ID = BatchColumn("document_id", pa.string(), "id of the document")
_DOCUMENT = BatchColumn("document", pa.string(), "text of the document: for a pair the one that answers the query")
_DOMAIN = BatchColumn("domain", pa.string(), "where the example comes from")

LAYOUTS: dict[Layout, BatchLayout] = {
    "pairs": BatchLayout(
        "Each example is a query and a document that answers it; the other documents of its batch are its negatives.",
        (
            _QUERY_ID,
            _QUERY,
            _DOCUMENT_ID,
            _DOCUMENT,
            BatchColumn("hard_negative_ids", _STRINGS, "ids of this example's hard negatives", per_negative=True),
            BatchColumn("hard_negatives", _STRINGS, "their texts", per_negative=True),
            BatchColumn(
                "masked",
                _INTEGERS,
                "false negatives that this row's softmax leaves out: columns over the batch's documents, then all its"
                " hard negatives in row order",
            ),
            _DOMAIN,
            BatchColumn("cluster", pa.int32(), "the cluster that it was packed from; -1: none"),
            BatchColumn(
                "positive_score", pa.float32(), "a teacher's score of the query and its document", fact="teacher_scores"
            ),
            BatchColumn(
                "hard_negative_scores",
                _FLOATS,
                "its scores of the query and this example's hard negatives",
                fact="teacher_scores",
                per_negative=True,
            ),
            BatchColumn(
                "surrogate_scores",
                _FLOATS,
                "the surrogate's scores of the query and the batch's documents, in row order",
                fact="surrogate_scores",
            ),
        ),
    ),
    "chunks": BatchLayout(
        "Each example is a chunk of a document; a batch holds chunks of a few documents.",
        (
            _DOCUMENT_ID,  # the chunk's own
            _DOCUMENT,
            BatchColumn("source_id", pa.string(), "id of the document that this is a chunk of"),
            BatchColumn("number", pa.int32(), "the chunk's place in it, from 0"),
            _DOMAIN,
        ),
    ),
    "candidates": BatchLayout(
        "Each example is a query with a list of documents.",
        (
            _QUERY_ID,
            _QUERY,
            BatchColumn("candidate_ids", _STRINGS, "ids of the documents listed for the query"),
            BatchColumn(
                "candidate_rows",
                pa.list_(pa.int64()),  # which a collection's stored vectors share
                "their rows in the collection that the lists were made from",
            ),
            BatchColumn("candidate_relevance", _INTEGERS, "their grades; null: not judged"),
            BatchColumn("candidate_scores", _FLOATS, "their scores; null: unknown"),
            _DOMAIN,
        ),
    ),
}

SHARED_ROWS = "lookup/rows-"
"""How names of the files begin that hold what all epochs share."""
_OPEN_FILES = 8


class _RowsInOrder:
    """Batches of rows that are stored once: read as the row groups of a parquet file are."""

    def __init__(self, rows: MappedRows, order: NDArray[np.int64]) -> None:
        self._rows, self._order = rows, order

    def read_row_group(self, number: int, columns: Sequence[str] | None) -> pa.Table:
        rows = self._rows.take(self._order[number])
        return rows if columns is None else rows.select(columns)


class BatchFiles:
    """The batches of an artifact, read by (epoch, number) in any order.

    Stored batches are one, and so is what is derived from them batch by batch.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._names: dict[int, list[str]] = {}  # of each epoch's files, in order
        self._firsts: dict[int, list[int]] = {}  # the first batch of each
        self._counts: dict[int, int] = {}
        for shard in artifact.shards:
            if "batches" not in shard.facts:
                continue  # what was written beside the batches: an audit
            epoch, batches = int(shard.facts["epoch"]), int(shard.facts["batches"])
            self._names.setdefault(epoch, []).append(shard.files[0].name)
            self._firsts.setdefault(epoch, []).append(self._counts.get(epoch, 0))
            self._counts[epoch] = self._firsts[epoch][-1] + batches
            self.batch_size = int(shard.facts["batch_size"])  # of every batch
        self._file = lru_cache(_OPEN_FILES)(self._open)
        self._reading = Lock()  # threads share the open files
        self._bytes: dict[str, list[int]] = {}

    @cached_property
    def _rows(self) -> MappedRows:
        """The rows that all epochs share."""
        return MappedRows([self.artifact.path(name) for name in self.artifact.names(SHARED_ROWS)])

    def _open(self, name: str) -> "pq.ParquetFile | _RowsInOrder":
        path = self.artifact.path(name)
        if name.endswith(".npy"):
            return _RowsInOrder(self._rows, np.load(path, mmap_mode="r"))
        return pq.ParquetFile(path)

    @property
    def epochs(self) -> int:
        """Number of epochs stored."""
        return len(self._counts)

    def number_of_batches(self, epoch: int) -> int:
        """Batches of that epoch. Raises ``UserError`` where it isn't stored."""
        if epoch not in self._counts:
            raise UserError(
                f"{self.artifact.uri} holds {counted(self.epochs, 'epoch')}, from 0 on, but epoch {epoch} was asked"
                " for. Pack more epochs, or train for fewer."
            )
        return self._counts[epoch]

    def distinct(self, column: str) -> set[Any]:
        """All values of a column, over all epochs; one file's in memory at a time."""
        if self.artifact.names(SHARED_ROWS):
            return self._rows.distinct(column)
        found: set[Any] = set()
        for name in chain.from_iterable(self._names.values()):
            table = pq.read_table(self.artifact.path(name), columns=[column])
            found |= set(table[column].unique().to_pylist())
        return found

    def read(self, epoch: int, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One batch, its rows in order, or some of its columns. Raises ``UserError`` where there is no such batch."""
        total = self.number_of_batches(epoch)
        if not 0 <= index < total:
            raise UserError(
                f"Epoch {epoch} of {self.artifact.uri} has batches 0 to {total - 1}, but {index} was asked for."
            )
        first, name = self._place(epoch, index)
        with self._reading:
            return self._file(name).read_row_group(index - first, columns)

    def stored_bytes(self, epoch: int, index: int) -> int:
        """Bytes of one batch's texts before compression, from its file's footer, which is read once.

        For batches with rows stored once it is the mean of all.
        """
        first, name = self._place(epoch, index)
        if name.endswith(".npy"):
            return self._rows.nbytes * self.batch_size // len(self._rows)
        if name not in self._bytes:
            footer = pq.read_metadata(self.artifact.path(name))
            self._bytes[name] = [_text_bytes(footer.row_group(group)) for group in range(footer.num_row_groups)]
        return self._bytes[name][index - first]

    def _place(self, epoch: int, index: int) -> tuple[int, str]:
        """The file that has the batch, and its first batch."""
        file = bisect_right(self._firsts[epoch], index) - 1
        return self._firsts[epoch][file], self._names[epoch][file]


class BatchReader(BatchFiles):
    """Reads stored batches by (epoch, number), from any process, in any order.

    Raises ``UserError`` where the artifact holds no batches. ``schema`` and ``columns`` are what every batch has.
    ``fingerprint`` identifies the batches that a training run consumed.

    It is also a sequence of the batches of all epochs, as plain lists and arrays. A ``DataLoader`` of torch takes it
    with ``batch_size=None``. Layout ``pairs`` has ``queries`` (B strings) and ``documents`` (M strings). Row i's
    positive is document i, and all hard negatives follow in row order. ``masked`` is bool (B, M); ``epoch`` and
    ``batch`` are numbers. Other layouts have a list for each column.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(Artifact(uri, BATCHES))
        facts = self.artifact.manifest["facts"]
        self.layout: Layout = facts["layout"]
        self.schema = LAYOUTS[self.layout].schema(facts)
        self.columns = tuple(self.schema.names)
        self.uri = self.artifact.uri
        self.fingerprint = self.artifact.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        """Open files stay here: a loader's processes open their own."""
        return BatchReader, (self.uri,)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        epoch, index = 0, number % len(self)
        while index >= self._counts[epoch]:
            epoch, index = epoch + 1, index - self._counts[epoch]
        rows = self.read(epoch, index)
        if self.layout != "pairs":
            return dict(rows.to_pydict())
        documents = rows["document"].to_pylist() + pc.list_flatten(rows["hard_negatives"]).to_pylist()
        batch = {"queries": rows["query"].to_pylist(), "documents": documents, "masked": mask_of(rows)}
        return batch | {"epoch": epoch, "batch": index}

    def to_dataset(self) -> Any:
        """All rows as a ``datasets.Dataset``, in memory, in stored order: their columns after ``epoch`` and ``batch``.

        Raises ``ImportError`` where ``datasets`` is not installed.
        """
        from datasets import Dataset
        from datasets.table import InMemoryTable

        places = [(epoch, index) for epoch in range(self.epochs) for index in range(self.number_of_batches(epoch))]
        numbers = np.repeat(np.array(places, dtype=np.int32), self.batch_size, axis=0)
        rows = pa.concat_tables(self.read(*place) for place in places)  # in chunks: offsets of lists have 32 bits
        columns = {"epoch": numbers[:, 0], "batch": numbers[:, 1]} | {name: rows[name] for name in self.columns}
        return Dataset(InMemoryTable(pa.table(columns)))


def _text_bytes(group: pq.RowGroupMetaData) -> int:
    columns = (group.column(place) for place in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.physical_type == "BYTE_ARRAY")


def mask_of(rows: pa.Table) -> NDArray[np.bool_]:
    """The batch's documents and hard negatives that each row of pairs leaves out, bool (B, M)."""
    negatives = int(pc.sum(pc.list_value_length(rows["hard_negatives"])).as_py())
    mask = np.zeros((len(rows), len(rows) + negatives), dtype=bool)
    mask[masked_cells(rows)] = True
    return mask


def masked_cells(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows, counted from 0, and columns, int64 (k,) each, of what ``rows`` of pairs leave out."""
    of_row = np.repeat(np.arange(len(rows)), pc.list_value_length(rows["masked"]))
    return of_row, np.asarray(pc.list_flatten(rows["masked"])).astype(np.int64)


class BatchWriter:
    """Writes batches of one epoch to the one file of a shard, each as a row group.

    ``schema``: of the layout and the facts that the manifest will have. Use as a context; ``commit`` comes after it.
    """

    def __init__(self, writer: ShardWriter, schema: pa.Schema, epoch: int, number: int, batch_size: int) -> None:
        self._writer = writer
        self._schema = schema
        self._epoch = epoch
        self._size = batch_size
        self._name = f"epoch={epoch:05d}/batches-{number:05d}.parquet"
        self._batches = 0
        self._file = pq.ParquetWriter(writer.path(self._name), schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.close()
        if kind is None:
            self._writer.add(self._name)

    def write(self, batch: pa.Table) -> None:
        """Adds one batch; its columns, in any order, are those of the schema."""
        if len(batch) != self._size:
            raise ValueError(f"a batch of {len(batch)} rows among batches of {self._size}")
        self._file.write_table(batch.select(self._schema.names).cast(self._schema), row_group_size=self._size)
        self._batches += 1

    def commit(self, counts: Mapping[str, int] | None = None, dropped: Mapping[str, int] | None = None) -> ShardRecord:
        """Commits the shard with the facts that ``BatchReader`` needs."""
        facts = {"epoch": self._epoch, "batches": self._batches, "batch_size": self._size}
        counted = {"batches": self._batches, **(counts or {})}
        return self._writer.commit(self._batches * self._size, counts=counted, dropped=dropped, facts=facts)


def epoch_permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of the ``count`` stored batches in epoch ``epoch``: int64 (count,)."""
    return np.random.default_rng([seed, epoch]).permutation(count)
