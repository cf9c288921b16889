"""`raytriever collect`: reads a source and stores it as a collection of documents, queries and judgments."""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import PositiveInt

from pipelines.formats.sources import AnySource, JoinedSources
from pipelines.formats.tables import pieces_of
from pipelines.jobs.left_out import check_kept, find_left_out, moved_queries, record_batches, record_schema
from pipelines.jobs.lookups import earlier_record
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact
from raytriever.artifacts.storage import Folder
from raytriever.errors import StorageError, Unfinishable, UserError
from raytriever.relations import ROW, open_relations, with_numbers
from raytriever.reports.table import counted
from raytriever.settings.configuration import input_paths
from raytriever.stages.cost import STORED, Cost, Size
from raytriever.stages.stage import BYTES_A_SECOND, WHOLE, Phase, Shard, Stage, StageConfig
from retrieval.collections.collection import COLLECTION, JUDGMENTS, SCHEMAS, Part, StoredCollection
from retrieval.collections.held_out import TRAIN, NewSplits
from retrieval.collections.records import Format, Limits, Piece, Source, reading_within

_ROWS_PER_GROUP = 1_000  # random reads of a row decode one group
_ROW_BITS = 40  # a row's number in all of a source: that of its piece, then its own
_COMPARED_BY = "compared"  # the shard
_MOVED = pa.schema([("query_id", pa.string()), ("split", pa.string())])
_COMPARED: dict[Part, list[str]] = {
    "documents": ["id", "text_key"],
    "queries": ["id", "text_key"],
    "judgments": ["query_id", "document_id", "relevance", "split"],
}


class SourcePiece(NamedTuple):
    """The input and output of one task: a piece of the source ``name``, with this ``number`` in it.

    ``place``: its number among the pieces of all sources.
    """

    name: str
    number: int
    piece: Piece | None
    place: int

    @property
    def read_by(self) -> str:
        """The shard that reads it."""
        return f"read-{self.place:05d}"

    @property
    def row(self) -> int:
        """The number of its first row of a part, in all of the source."""
        return self.number << _ROW_BITS


class CollectConfig(StageConfig):
    """Which source becomes the collection."""

    source: AnySource
    """The source, by its format."""
    bytes_per_shard: PositiveInt = 32 << 20
    """Bytes of the source that one worker reads. Larger files of lines or parquet are split."""
    new_splits: NewSplits | None = None
    """Splits for validation and testing, drawn from the judgments where these have none. null: judgments stay as they
    are. With cross_validation the source's folds are the splits."""
    limits: Limits = Limits()
    """Largest pieces of the source."""


class Collect(Stage[CollectConfig]):
    """Reads pieces of each source; finds repeated and unknown ids of all of it; writes what is left."""

    command = "collect"
    kind = COLLECTION
    algorithm_version = 10
    config_class = CollectConfig
    unit = "documents"

    def _names(self) -> list[str]:
        """Names of several sources; '' for an only one."""
        source = self.config.source
        return sorted(source.sources) if isinstance(source, JoinedSources) else [""]

    def _open(self, name: str) -> Source:
        source = self.config.source
        with reading_within(self.config.limits):
            return (source.sources[name] if isinstance(source, JoinedSources) else source).open()

    def check_inputs(self, there: Set[str]) -> None:
        """Opens the source, which names a missing folder, file or split."""
        if input_paths(self.config).keys() <= there and not is_artifact(self.config.output):
            for format_, policies in map(self._open, self._names()):
                if policies.cross_validation and not format_.judgments_name:
                    raise UserError(
                        f"cross_validation divides judged queries, but with {format_.documents_name} no judgments"
                        " are read. Give them too, or leave cross_validation out."
                    )

    def resolved(self) -> dict[str, Any]:
        """Without limits, which change nothing that is read."""
        return {name: value for name, value in super().resolved().items() if name != "limits"}

    def input_fingerprints(self) -> dict[str, str]:
        """One hash over what the sources say of their own bytes."""
        found = {name: self._open(name).format.fingerprint() for name in self._names()}
        return {"source": hashlib.sha256(json.dumps(found.get("", found), sort_keys=True).encode()).hexdigest()}

    def cost(self, read: Size) -> Cost:
        """Pieces of the sources, which ``read`` is of, are read and written."""
        tasks = 2 * ceil(read.texts / self.config.bytes_per_shard)
        made = replace(read, splits=self._splits(read.splits), disk=STORED * read.texts)
        return Cost(made, 37e-6 * read.documents, tasks)

    def _splits(self, read: Mapping[str, tuple[int, int]]) -> Mapping[str, tuple[int, int]]:
        """Queries and judged pairs of each, with those that are taken for new splits."""
        taken_from, wanted = NewSplits.wanted(list(read))
        queries, pairs = read.get(taken_from, (0, 0))
        if not self.config.new_splits or not queries:
            return read
        size = self.config.new_splits.size(queries)
        sizes = {taken_from: queries - len(wanted) * size, **dict.fromkeys(wanted, size)}
        return {**read, **{split: (count, round(pairs * count / queries)) for split, count in sizes.items()}}

    def phases(self) -> list[Phase]:
        """Pieces of the sources are read, all records of a source compared, and the pieces written."""
        found = [(name, *each) for name in self._names() for each in enumerate(self._pieces(name))]
        pieces = [SourcePiece(*each, place) for place, each in enumerate(found)]
        return [
            Phase("read", pieces, self._read),
            Phase(_COMPARED_BY, WHOLE, self._compare),
            Phase("write", pieces, self._write, intermediate=False),
        ]

    def seconds_here(self, pending: list[Shard]) -> float:
        """Seconds of reading the sources' files."""
        return len(pending) * min(self.config.bytes_per_shard, self._bytes()) / BYTES_A_SECOND

    def reads(self) -> str:
        """The sources' first file, and how many more there are."""
        first, *more = [file for format_ in self._formats() for file in format_.files] or [""]
        return f"{first} and {counted(len(more), 'more file')}" if more else first

    def _bytes(self) -> int:
        count = 0
        for format_ in self._formats():
            sizes = format_.folder.files() if format_.files else {}
            count += sum(sizes.get(file, 0) for file in set(format_.files))
        return count

    def _formats(self) -> Iterator[Format]:
        return (self._open(name).format for name in self._names())

    def _pieces(self, name: str) -> list[Piece | None]:
        """None: all of the source."""
        return pieces_of(self._open(name).format, self.config.bytes_per_shard)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards. Raises ``Unfinishable`` for what is wrong with a source: a mended one is another one."""
        try:
            return super().make(shard, writer)
        except StorageError:
            raise
        except UserError as error:
            raise Unfinishable(str(error)) from error

    def _read(self, piece: SourcePiece, writer: ShardWriter) -> ShardRecord:
        """Hands on all records of a piece."""
        within = partial(reading_within, self.config.limits, piece.piece)
        try:
            with within() as absent:
                return self._read_piece(piece, writer, absent)
        except UserError:
            with within(counts_lines=True):  # now the message names the line
                for part in SCHEMAS:
                    deque(record_batches(self._open(piece.name).format, part), maxlen=0)
            raise

    def _read_piece(self, piece: SourcePiece, writer: ShardWriter, absent: dict[str, str]) -> ShardRecord:
        format_ = self._open(piece.name).format
        for part in SCHEMAS:
            path = writer.path(_records_of(writer.name, part))
            with pq.ParquetWriter(path, record_schema(part), compression="lz4", use_dictionary=False) as file:
                for batch in record_batches(format_, part):
                    file.write_batch(batch)
            writer.add(_records_of(writer.name, part))
        facts = {"absent": absent, "of_format": format_.facts}
        return writer.commit(counts=format_.counts, dropped=format_.left_out, facts=facts)

    def _compare(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Tells later phases which rows of each source are left out, why, and which queries change their split."""
        taken_from = dict[str, str]()
        pieces = self._phases["read"].tasks if self.config.new_splits else ()
        judged = (self._records(_records_of(piece.read_by, "judgments"), ["split"]) for piece in pieces)
        splits = sorted({split for of in chain.from_iterable(judged) for split in of["split"].unique().to_pylist()})
        for number, name in enumerate(self._names()):
            self._refuse_absent(name)
            with open_relations(self.config, writer.path("spill")) as db:
                for part, columns in _COMPARED.items():
                    schema = pa.schema([*map(record_schema(part).field, columns), ROW])
                    db.load(f"CREATE TABLE {part} AS FROM stream", schema, self._numbered(name, part, schema))
                source, record_at = self._open(name), partial(self._record_at, name)
                find_left_out(db, source, record_at)
                check_kept(db, source, record_at)
                path = writer.path(_left_out(number))
                db.write("SELECT part, row, reason FROM left_out ORDER BY part, row", path)
                taken_from[name], moved = moved_queries(db, source, self.config.new_splits, splits, record_at)
                writer.add_table(_moved(number), pa.table([list(moved), list(moved.values())], schema=_MOVED))
            writer.add(_left_out(number))
        return writer.commit(facts=taken_from)

    def _pieces_of(self, name: str) -> Iterator[SourcePiece]:
        return (piece for piece in self._phases["read"].tasks if piece.name == name)

    def _refuse_absent(self, name: str) -> None:
        """Columns that no piece of the source has."""
        absent = defaultdict[str, set[str]](set)
        for piece in self._pieces_of(name):
            for column, problem in earlier_record(self.config.output, piece.read_by).facts["absent"].items():
                absent[column].add(problem)
        for problems in absent.values():
            if "" not in problems:
                raise UserError(min(problems))

    def _numbered(self, name: str, part: Part, schema: pa.Schema) -> Iterator[pa.Table]:
        """Columns of all records of a source, with the number of each."""
        for piece in self._pieces_of(name):
            yield from with_numbers(self._records(_records_of(piece.read_by, part), _COMPARED[part]), schema, piece.row)

    def _records(self, file: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The records that a piece handed on, as many at once as were read at once."""
        with Folder(self.config.output).open_input(file) as source:
            records = pq.ParquetFile(source)
            for group in range(records.num_row_groups):
                yield records.read_row_group(group, columns=columns).combine_chunks().to_batches()[0]

    def _record_at(self, name: str, part: Part, row: int) -> Any:
        """The record of a row in all of a source, read again."""
        piece, row = divmod(row, 1 << _ROW_BITS)
        with reading_within(self.config.limits, self._pieces(name)[piece], counts_lines=True):
            return next(islice(getattr(self._open(name).format, part)(), row, None))

    def _write(self, piece: SourcePiece, writer: ShardWriter) -> ShardRecord:
        """Writes what is left of a piece: documents, queries, judgments."""
        name = piece.name
        read, counts, dropped = earlier_record(self.config.output, piece.read_by), dict[Part, int](), Counter[str]()
        own_rows = [("row", ">=", piece.row), ("row", "<", piece.row + (1 << _ROW_BITS))]
        with Folder(self.config.output).open_input(_left_out(self._names().index(name))) as source:
            left_out = pq.read_table(source, filters=own_rows)
        for part, schema in SCHEMAS.items():
            of_part = left_out.filter(pc.equal(left_out["part"], part))
            dropped.update(of_part["reason"].to_pylist())
            batches = self._kept(_records_of(piece.read_by, part), part, of_part["row"].to_numpy() - piece.row)
            if part == "judgments":
                batches = self._moved(batches, name)
            folder = f"{part}/{name}".rstrip("/")
            counts[part] = write_part(writer, folder, schema, _named(batches, name), piece.number)
        if self._open(name).format.judgments_name:
            dropped.pop("repeated_documents", None)  # training sets repeat by nature, and their queries too
        dropped.pop("repeated_queries", None)
        return writer.commit(
            counts["documents"],
            counts=counts | _told_by(name, read.counts),
            dropped=_told_by(name, read.dropped | dropped),
            facts=_told_by(name, read.facts["of_format"]),
        )

    def _moved(self, batches: Iterable[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
        """Judgments with the new splits of their queries; what else is of the split these came from is 'train'."""
        taken_from = earlier_record(self.config.output, _COMPARED_BY).facts[name]
        if not taken_from:
            yield from batches
            return
        with Folder(self.config.output).open_input(_moved(self._names().index(name))) as source:
            moved = pq.read_table(source).combine_chunks()
        queries, new = moved["query_id"].chunk(0), moved["split"].chunk(0)
        place = JUDGMENTS.get_field_index("split")
        for batch in batches:
            found = pc.index_in(batch["query_id"], value_set=queries)
            splits = pc.coalesce(new.take(found), TRAIN)
            splits = pc.if_else(pc.equal(batch["split"], taken_from), splits, batch["split"])
            yield batch.set_column(place, JUDGMENTS.field(place), splits)

    def _kept(self, records: str, part: Part, left_out: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """The rows of a file of records without those ``left_out``, ascending."""
        first = 0
        for batch in self._records(records, SCHEMAS[part].names):
            begin, end = np.searchsorted(left_out, [first, first + len(batch)])
            keeps = np.ones(len(batch), dtype=bool)
            keeps[left_out[begin:end] - first] = False
            first += len(batch)
            yield batch.filter(pa.array(keeps))

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Facts of the sources, such as the interpreter's version."""
        return {fact: value for record in records for fact, value in record.facts.items()}

    def summary(self, artifact: Artifact) -> str:
        """Documents, queries and judgments, and how much of the source is none of these."""
        stored = StoredCollection(artifact.uri)
        parts: list[str] = [f"{stored.count(part):,} {part}" for part in SCHEMAS]
        dropped = artifact.manifest["dropped"].items()
        left_out = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped if count]
        return ", ".join(parts) + (f" (left out: {', '.join(left_out)})" if left_out else "")


def _records_of(shard: str, part: Part) -> str:
    return f"records/{shard}.{part}.parquet"


def _left_out(source: int) -> str:
    return f"left_out/{source:05d}.parquet"


def _moved(source: int) -> str:
    return f"moved/{source:05d}.parquet"


def _prefix(name: str) -> str:
    """The prefix of ids and facts of one of several sources."""
    return f"{name}/" if name else ""


def _told_by(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """A source's facts, with its name, if it has one."""
    return {_prefix(name) + what: value for what, value in told.items()}


def _named(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    """Batches with the source's name, if it has one, in their ids, and as domain where there is none."""
    for batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for ids in columns.keys() & {"id", "query_id", "document_id"} if name else ():
            columns[ids] = pc.binary_join_element_wise(_prefix(name), columns[ids], "")
        if name and "domain" in columns:
            columns["domain"] = pc.if_else(pc.equal(columns["domain"], ""), name, columns["domain"])
        yield pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def write_part(
    writer: ShardWriter,
    part: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    number: int,
    coded: Any = ("domain", "split"),  # pyarrow's signature knows only True and False
) -> int:
    """Writes ``<part>/<number>.parquet``, without a row only the first; returns the number of rows."""
    name, rows = f"{part}/{number:05d}.parquet", 0
    with pq.ParquetWriter(writer.path(name), schema, compression="zstd", use_dictionary=coded) as file:
        for batch in filter(len, batches):
            file.write_batch(batch, row_group_size=_ROWS_PER_GROUP)
            rows += len(batch)
    if rows or not number:
        writer.add(name)
    return rows
