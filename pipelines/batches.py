"""The contract between batch construction and training: batches stored as data.

One row is one example, one row group is one batch, so batch i is one seek. Files are
``epoch=<epoch>/batches-<number>.parquet``; every epoch has its own batches and its own masks. What a row is, the
manifest's fact ``layout`` says; ``SCHEMAS`` has the columns of each.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Literal, Self, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError

BATCHES = "batches"
Layout = Literal["pairs", "chunks", "candidates"]

_STRINGS, _INTEGERS, _FLOATS = pa.list_(pa.string()), pa.list_(pa.int32()), pa.list_(pa.float32())
_ROWS = pa.list_(pa.int64())


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in columns.items()])


SCHEMAS: dict[Layout, pa.Schema] = {
    # a query with its document and hard negatives
    "pairs": _schema(
        query_id=pa.string(),
        query=pa.string(),
        document_id=pa.string(),
        document=pa.string(),
        hard_negative_ids=_STRINGS,
        hard_negatives=_STRINGS,
        # columns left out of this row's softmax: over the batch's documents, then all its hard negatives, in row order
        masked=_INTEGERS,
        domain=pa.string(),
        cluster=pa.int32(),  # -1: of no clustering
    ),
    # a chunk of a source document; the batch has consecutive chunks of a few
    "chunks": _schema(
        document_id=pa.string(),  # the chunk's own
        document=pa.string(),
        source_id=pa.string(),
        number=pa.int32(),  # its place in the source, from 0
        domain=pa.string(),
    ),
    # a query with a ranked or labelled list of documents, whose texts or vectors are elsewhere
    "candidates": _schema(
        query_id=pa.string(),
        query=pa.string(),
        candidate_ids=_STRINGS,
        candidate_rows=_ROWS,  # their rows in the collection, which its stored vectors share
        candidate_relevance=_INTEGERS,  # null: not judged
        candidate_scores=_FLOATS,  # null: unknown
        domain=pa.string(),
    ),
}

# further columns of batches of pairs whose manifest has the fact ``teacher_scores``
TEACHER_SCORES = _schema(positive_score=pa.float32(), hard_negative_scores=_FLOATS)

_OPEN_FILES = 8


def batch_schema(layout: Layout, *, teacher_scores: bool = False) -> pa.Schema:
    """The columns of a layout, with those of a teacher's scores of each row's document and its hard negatives."""
    return pa.schema([*SCHEMAS[layout], *TEACHER_SCORES]) if teacher_scores else SCHEMAS[layout]


class BatchFiles:
    """The files of an artifact with one row group a batch, read by (epoch, number) in any order.

    Stored batches are one, and so is what is derived from them batch by batch. ``columns``: what every file must have.
    """

    def __init__(self, artifact: Artifact, columns: Sequence[str]) -> None:
        self._artifact = artifact
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
        self._file = lru_cache(_OPEN_FILES)(partial(_opened, artifact, tuple(columns)))
        self._bytes: dict[str, NDArray[np.int64]] = {}

    @property
    def epochs(self) -> int:
        """Number of epochs stored."""
        return len(self._counts)

    @property
    def batch_size(self) -> int:
        """Examples of every batch."""
        return int(self._artifact.shards[0].facts["batch_size"])

    def number_of_batches(self, epoch: int) -> int:
        """Batches of that epoch. Raises ``UserError`` where it isn't stored."""
        if epoch not in self._counts:
            raise UserError(
                f"{self._artifact.uri} holds {self.epochs} epochs of batches, epoch {epoch} was asked for. Pack more"
                " epochs, or train for fewer."
            )
        return self._counts[epoch]

    def distinct(self, column: str) -> set[Any]:
        """All values of a column, over all epochs; one file's in memory at a time."""
        found: set[Any] = set()
        for name in chain.from_iterable(self._names.values()):
            table = pq.read_table(self._artifact.path(name), columns=[column])
            found |= set(table[column].unique().to_pylist())
        return found

    def read(self, epoch: int, index: int) -> pa.Table:
        """One batch, its rows in order. Raises ``UserError`` where there is no such batch."""
        total = self.number_of_batches(epoch)
        if not 0 <= index < total:
            raise UserError(
                f"Epoch {epoch} of {self._artifact.uri} has batches 0 to {total - 1}; {index} was asked for."
            )
        first, name = self._place(epoch, index)
        return self._file(name).read_row_group(index - first)

    def stored_bytes(self, epoch: int, index: int) -> int:
        """Bytes of one batch before compression, from its file's footer, which is read once."""
        first, name = self._place(epoch, index)
        if name not in self._bytes:
            footer = pq.read_metadata(self._artifact.path(name))
            sizes = (footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
            self._bytes[name] = np.fromiter(sizes, np.int64, footer.num_row_groups)
        return int(self._bytes[name][index - first])

    def _place(self, epoch: int, index: int) -> tuple[int, str]:
        """The file that has the batch, and its first batch."""
        file = bisect_right(self._firsts[epoch], index) - 1
        return self._firsts[epoch][file], self._names[epoch][file]


def _opened(artifact: Artifact, columns: Sequence[str], name: str) -> pq.ParquetFile:
    """One of the artifact's files. Raises ``UserError`` where one of the columns is not there."""
    file = pq.ParquetFile(artifact.path(name))
    missing = [column for column in columns if column not in file.schema_arrow.names]
    if missing:
        raise UserError(
            f"The batches in {artifact.uri} have no column {', '.join(missing)}: an earlier version made them. Make"
            " them again, by the same recipe or command with --force."
        )
    return file


class BatchReader:
    """Reads stored batches by (epoch, number), from any process, in any order.

    Raises ``UserError`` where the artifact holds no batches, or batches of a layout that this version doesn't know.
    ``schema`` and ``columns`` are what every batch has, ``fingerprint`` names the exact batches that a training run
    consumed.
    """

    def __init__(self, uri: str) -> None:
        self.artifact = Artifact(uri, BATCHES)
        self.uri = self.artifact.uri
        self.fingerprint = self.artifact.fingerprint
        self.layout: Layout = _layout_of(self.artifact)
        self.has_teacher_scores = bool(self.artifact.manifest["facts"].get("teacher_scores"))
        self.schema = batch_schema(self.layout, teacher_scores=self.has_teacher_scores)
        self.columns = tuple(self.schema.names)
        self.files = BatchFiles(self.artifact, self.columns)

    @property
    def epochs(self) -> int:
        """Number of epochs stored."""
        return self.files.epochs

    @property
    def batch_size(self) -> int:
        """Examples of every batch."""
        return self.files.batch_size

    def number_of_batches(self, epoch: int) -> int:
        """Batches of that epoch. Raises ``UserError`` where it isn't stored."""
        return self.files.number_of_batches(epoch)

    def read(self, epoch: int, index: int) -> pa.Table:
        """One batch, its rows in order. Raises ``UserError`` where there is no such batch."""
        return self.files.read(epoch, index)

    def stored_bytes(self, epoch: int, index: int) -> int:
        """Bytes of one stored batch before compression."""
        return self.files.stored_bytes(epoch, index)


def _layout_of(artifact: Artifact) -> Layout:
    layout = artifact.manifest["facts"].get("layout", "pairs")  # before there were layouts, all batches were pairs
    if layout not in get_args(Layout):
        raise UserError(
            f"{artifact.uri} holds batches of layout {layout!r}; this version reads {', '.join(get_args(Layout))}."
            " Update Raytriever, or make the batches again."
        )
    known: Layout = layout
    return known


class BatchFile:
    """Writes batches of one epoch to the one file of a shard, each as a row group.

    Use as a context; ``commit`` comes after it. Batches with ``teacher_scores`` need the fact of that name in their
    manifest.
    """

    def __init__(
        self,
        writer: ShardWriter,
        layout: Layout,
        epoch: int,
        number: int,
        batch_size: int,
        *,
        teacher_scores: bool = False,
    ) -> None:
        self._writer = writer
        self._schema = batch_schema(layout, teacher_scores=teacher_scores)
        self._epoch = epoch
        self._size = batch_size
        self._name = f"epoch={epoch:05d}/batches-{number:05d}.parquet"
        self._batches = 0
        self._file = pq.ParquetWriter(writer.path(self._name), self._schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.close()

    def write(self, batch: pa.Table) -> None:
        """Adds one batch; its columns, in any order, are those of the schema."""
        if len(batch) != self._size:
            raise ValueError(f"a batch of {len(batch)} rows among batches of {self._size}")
        self._file.write_table(batch.select(self._schema.names).cast(self._schema), row_group_size=self._size)
        self._batches += 1

    def commit(
        self,
        counts: Mapping[str, int] | None = None,
        dropped: Mapping[str, int] | None = None,
        beside: Sequence[str] = (),
    ) -> ShardRecord:
        """Commits the shard with the facts that ``BatchReader`` needs; ``beside``: more files built for it."""
        for name in [self._name, *beside]:
            self._writer.add(name)
        facts = {"epoch": self._epoch, "batches": self._batches, "batch_size": self._size}
        counted = {"batches": self._batches, **(counts or {})}
        return self._writer.commit(self._batches * self._size, counts=counted, dropped=dropped, facts=facts)


def epoch_permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order in which epoch ``epoch`` goes through its ``count`` stored batches: int64 (count,)."""
    return np.random.default_rng([seed, epoch]).permutation(count).astype(np.int64)
