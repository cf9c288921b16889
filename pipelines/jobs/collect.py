"""`raytriever collect`: reads a source and stores it as a collection of documents, queries and judgments."""

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from pipelines.exchange import new_file, number_parts, read_parts, write_parts
from pipelines.formats.pieces import pieces_of
from pipelines.formats.sources import AnySource, JoinedSources
from pipelines.jobs.lookups import earlier_record
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact
from raytriever.artifacts.storage import Folder
from raytriever.errors import StorageError, Unfinishable, UserError
from raytriever.settings.configuration import input_paths
from raytriever.stages.cost import STORED, Cost, Size
from raytriever.stages.stage import BYTES_A_SECOND, Shard, Stage, StageConfig
from retrieval.collections.collection import COLLECTION, JUDGMENTS, SCHEMAS, Part, StoredCollection
from retrieval.collections.reading import Limits, Piece, reading_within
from retrieval.collections.records import CrossValidation, Source
from retrieval.collections.unfit_records import KEYS, OF_PART, REASONS, keyed_records, row_of_both, unfit_rows

_ROWS_PER_GROUP = 1_000  # random reads of a row decode one group
PIECES_OF_A_RANGE = 16
"""Pieces whose ids, in number, one worker compares."""
_KEYS_AT_ONCE = 1 << 20
_ROW_BITS = 40  # a row's number in all of a source: that of its piece, then its own
_UNKNOWN = "judgments_of_unknown_"
_LEFT_OUT = pa.schema([("reason", pa.uint8()), ("row", pa.int64())])


class CollectConfig(StageConfig):
    """Which source becomes the collection."""

    source: AnySource
    """The source, by its format."""
    bytes_per_shard: int = Field(default=32 << 20, gt=0)
    """Bytes of the source that one worker reads; files of lines, and of parquet, are cut where they are larger."""
    limits: Limits = Limits()
    """How large one piece of the source may be."""


class Collect(Stage[CollectConfig]):
    """Reads pieces of each source; finds repeated and unknown ids, each range of hashes by itself; writes what is left.

    Memory is that of a piece's keys, or of a range's: 25 bytes for each id and three times that for each judgment.
    """

    command = "collect"
    kind = COLLECTION
    algorithm_version = 5
    config_class = CollectConfig
    unit = "documents"

    def _names(self) -> list[str]:
        """Of several sources; '' stands for the only one."""
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
                        f"cross_validation shares out judged queries, but with {format_.documents_name} no judgments"
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
        return Cost(replace(read, disk=STORED * read.texts), 37e-6 * read.documents, tasks)

    def plan(self) -> list[Shard]:
        """Of each source its pieces to read, ranges of hashes to compare, and the pieces again to write."""
        shards = []
        for name in self._names():
            pieces = self._pieces(name)
            ranges = ceil(len(pieces) / PIECES_OF_A_RANGE)
            of = {"name": name, "pieces": len(pieces), "ranges": ranges}
            for number, piece in enumerate(pieces):
                description = {**of, "number": number, "piece": piece}
                shards.append(Shard(_shard("read", number, name), description, 0, intermediate=True))
                shards.append(Shard(_shard("write", number, name), description, 2))
            for number in range(ranges):
                description = {**of, "number": number}
                shards.append(Shard(_shard("compare", number, name), description, 1, intermediate=True))
        return sorted(shards, key=lambda shard: shard.phase)

    def seconds_here(self, pending: list[Shard]) -> float:
        """Of reading the sources' files."""
        return len(pending) * min(self.config.bytes_per_shard, self._bytes()) / BYTES_A_SECOND

    def _bytes(self) -> int:
        count = 0
        for format_ in (self._open(name).format for name in self._names()):
            sizes = format_.folder.files() if format_.files else {}
            count += sum(sizes.get(file, 0) for file in set(format_.files))
        return count

    def _pieces(self, name: str) -> list[Piece | None]:
        """None: all of the source. Folds need all judgments together."""
        format_, policies = self._open(name)
        return [None] if policies.cross_validation else pieces_of(format_, self.config.bytes_per_shard)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists. Raises ``Unfinishable`` for what is wrong with the source."""
        with _until_mended():
            return [self._read, self._compare, self._write][shard.phase](shard, writer)

    def _read(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Hands on all records of a piece, and by ranges of hashes what they are compared by."""
        within = partial(reading_within, self.config.limits, shard.description["piece"])
        try:
            with within() as absent:
                return self._read_piece(shard, writer, absent)
        except UserError:
            if shard.description["piece"] is None:
                raise
            with within(counts_lines=True):  # now the message names the line
                for part in SCHEMAS:
                    deque(keyed_records(self._open(shard.description["name"]).format, part), maxlen=0)
            raise

    def _read_piece(self, shard: Shard, writer: ShardWriter, absent: dict[str, str]) -> ShardRecord:
        format_, ranges = self._open(shard.description["name"]).format, shard.description["ranges"]
        keys, files = list[pa.Table](), 0
        for part in SCHEMAS:
            with new_file(writer.path(_file(shard.name, part)), SCHEMAS[part]) as file:
                for rows, table in keyed_records(format_, part):
                    file.write_batch(rows)
                    keys.append(table)
                    if sum(map(len, keys)) >= _KEYS_AT_ONCE:
                        files = _write_keys(writer, shard.name, files, keys, ranges)
        files = _write_keys(writer, shard.name, files, keys, ranges)
        for part in SCHEMAS:
            writer.add(_file(shard.name, part))
        facts = {"keys": files, "absent": absent, "of_format": format_.facts}
        return writer.commit(0, counts=format_.counts, dropped=format_.left_out, facts=facts)

    def _compare(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Hands on which rows of each piece are left out, by what all records of a range of hashes tell."""
        of, name = shard.description, shard.description["name"]
        tables, found = [KEYS.empty_table()], [_LEFT_OUT.empty_table()]
        absent = defaultdict[str, set[str]](set)
        for piece in range(of["pieces"]):
            record = earlier_record(self.config.output, read := _shard("read", piece, name))
            for column, problem in record.facts["absent"].items():
                absent[column].add(problem)
            files = [_file(read, f"keys-{file}") for file in range(record.facts["keys"])]
            table = read_parts(self.config.output, files, [of["number"]])
            rows = pc.add(table["row"], piece << _ROW_BITS)
            tables.append(table.set_column(KEYS.get_field_index("row"), "row", rows))
        for problems in absent.values():
            if "" not in problems:
                raise UserError(min(problems))
        for code, rows in unfit_rows(pa.concat_tables(tables), *self._open(name), partial(self._record_at, name)):
            found.append(pa.table([np.full(len(rows), code, np.uint8), rows], schema=_LEFT_OUT))
        table = pa.concat_tables(found)
        pieces, rows = np.divmod(table["row"].to_numpy(), 1 << _ROW_BITS)
        table = table.set_column(1, "row", pa.array(rows))
        write_parts(writer, _file(shard.name, "left_out"), table, pieces, of["pieces"])
        return writer.commit(0)

    def _record_at(self, name: str, part: Part, row: int) -> Any:
        """The record of a row in all of a source, read again."""
        piece, row = divmod(row, 1 << _ROW_BITS)
        with reading_within(self.config.limits, self._pieces(name)[piece], counts_lines=True):
            return next(islice(getattr(self._open(name).format, part)(), row, None))

    def _write(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Writes what is left of a piece: documents, queries, judgments."""
        of, name = shard.description, shard.description["name"]
        format_, policies = self._open(name)
        read = earlier_record(self.config.output, _shard("read", of["number"], name))
        files = [_file(_shard("compare", number, name), "left_out") for number in range(of["ranges"])]
        left_out = read_parts(self.config.output, files, [of["number"]])
        counts, dropped, facts = dict[str, int](), dict(read.dropped), dict(read.facts["of_format"])
        for part, schema in SCHEMAS.items():
            rows, reasons = _rows_left_out(left_out, part)
            dropped |= Counter(reasons)
            batches: Iterable[pa.RecordBatch] = self._kept(read.name, part, rows)
            if part == "judgments" and policies.cross_validation:
                judgments = pa.Table.from_batches(batches, schema)
                batches = self._shared_out(judgments, rows, policies.cross_validation, name)
            unknown = next((place for place, reason in enumerate(reasons) if reason.startswith(_UNKNOWN)), None)
            if unknown is not None and policies.unknown_ids == "refuse":
                row = int(rows[unknown]) + (of["number"] << _ROW_BITS)
                facts[_UNKNOWN] = [row, reasons[unknown].removeprefix(_UNKNOWN)]
            counts[part] = write_part(writer, f"{part}/{name}".rstrip("/"), schema, _named(batches, name), of["number"])
        if format_.judgments_name:
            dropped.pop("repeated_documents", None)  # training sets repeat by nature, and their queries too
        dropped.pop("repeated_queries", None)
        counted, dropped, facts = (
            {_prefix(name) + key: value for key, value in found.items()} for found in (read.counts, dropped, facts)
        )
        return writer.commit(counts["documents"], counts=counts | counted, dropped=dropped, facts=facts)

    def _kept(self, read: str, part: Part, left_out: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """The rows that a shard read, without those ``left_out``, ascending."""
        first = 0
        with Folder(self.config.output).open_input(_file(read, part)) as source:
            stored = pa.ipc.open_file(source)
            for number in range(stored.num_record_batches):
                batch = stored.get_batch(number)
                begin, end = np.searchsorted(left_out, [first, first + len(batch)])
                keeps = np.ones(len(batch), dtype=bool)
                keeps[left_out[begin:end] - first] = False
                first += len(batch)
                yield batch.filter(pa.array(keeps))

    def _shared_out(
        self, judgments: pa.Table, left_out: NDArray[np.int64], folds: CrossValidation, name: str
    ) -> list[pa.RecordBatch]:
        """The judgments with the splits that folds give them.

        Raises ``UserError`` where no judgment is of the split, or one of its queries is judged in another split too.
        """
        both, splits = row_of_both(judgments, folds.split), judgments["split"].to_pylist()
        if both is not None:
            own = np.setdiff1d(np.arange(len(judgments) + len(left_out)), left_out)
            record = self._record_at(name, "judgments", int(own[both]))
            raise UserError(
                f"{record.place} judges query {record.query_id!r} in split '{record.split}', and it is judged in"
                f" {'another split' if record.split == folds.split else f'split {folds.split!r}'} too. cross_validation"
                f" shares out the queries of '{folds.split}', so one that is tested could be trained on too. Read split"
                f" '{folds.split}' alone (splits: [{folds.split}], where the kind has that setting), or take the query"
                " out of the other split."
            )
        if splits and folds.split not in splits:
            raise UserError(
                f"cross_validation.split is '{folds.split}', but {self._open(name).format.judgments_name} has no"
                f" judgments of it. Splits there: {', '.join(sorted(set(splits)))}."
            )
        shared = list(map(folds.split_of, judgments["query_id"].to_pylist(), splits))
        place = JUDGMENTS.get_field_index("split")
        table = judgments.set_column(place, JUDGMENTS.field(place), pa.array(shared, pa.string()))
        return list(table.to_batches())

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """What the sources say of themselves (the interpreter's version, say).

        Raises ``Unfinishable`` for a source that lacks documents, queries or judgments, or what its judgments name.
        """
        for name in self._names():
            of_source = [name] if name else []
            with _until_mended():
                self._check_totals(name, [record for record in records if record.name.split("-", 2)[2:] == of_source])
        return {fact: value for record in records for fact, value in record.facts.items()}

    def _check_totals(self, name: str, records: list[ShardRecord]) -> None:
        (format_, policies), prefix = self._open(name), _prefix(name)
        counts, dropped = Counter[str](), Counter[str]()
        for record in records:
            counts.update(record.counts)
            dropped.update({reason.removeprefix(prefix): number for reason, number in record.dropped.items()})
        needs_queries = format_.judgments_name or dropped["empty_queries"]
        wanted = {"documents": format_.documents_name} | ({"queries": format_.queries_name} if needs_queries else {})
        for part, where in wanted.items():
            if not counts[part]:
                raise UserError(f"{where} holds no {part} with a text. Is it the right file, is it complete?")
        first = next((record.facts[prefix + _UNKNOWN] for record in records if prefix + _UNKNOWN in record.facts), None)
        if first and policies.unknown_ids == "refuse":
            row, part = first
            record = self._record_at(name, "judgments", row)
            raise UserError(
                f"{record.place} names {record[1 if part == 'queries' else 2]!r}, which {wanted[part]} does not hold;"
                f" in all, {dropped[_UNKNOWN + 'documents']} judgments name unknown documents and"
                f" {dropped[_UNKNOWN + 'queries']} unknown queries. Complete the files, or set unknown_ids to 'drop' to"
                " leave these judgments out."
            )
        if format_.judgments_name and not counts["judgments"]:
            left_out = {reason: number for reason, number in sorted(dropped.items()) if "judgments" in reason}
            counted = ", ".join(f"{reason} {number}" for reason, number in left_out.items())
            raise UserError(
                f"No judgments to keep in {format_.judgments_name}: {sum(left_out.values())} were left out"
                f" ({counted or 'there are none'}). Are these the right files?"
            )

    def summary(self, artifact: Artifact) -> str:
        """Documents, queries and judgments, and how much of the source is none of these."""
        stored = StoredCollection(artifact.uri)
        parts: list[str] = [f"{stored.count(part):,} {part}" for part in SCHEMAS]
        left_out = sum(artifact.manifest["dropped"].values())
        return ", ".join(parts) + (f" ({left_out:,} left out)" if left_out else "")


@contextmanager
def _until_mended() -> Iterator[None]:
    """Of what is wrong with a source: once mended it is another one, so that nothing made of this one is kept."""
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        raise Unfinishable(str(error)) from error


def _shard(make: str, number: int, name: str) -> str:
    return f"{make}-{number:05d}" + (f"-{name}" if name else "")


def _file(shard: str, what: str) -> str:
    return f"exchange/{shard}.{what}.arrow"


def _prefix(name: str) -> str:
    """What ids of a source of several begin with, and what it says of itself."""
    return f"{name}/" if name else ""


def _write_keys(writer: ShardWriter, shard: str, number: int, keys: list[pa.Table], ranges: int) -> int:
    """Writes the keys by ranges, and forgets them; returns the number of files with it."""
    table = pa.concat_tables([KEYS.empty_table(), *keys])
    keys.clear()
    write_parts(writer, _file(shard, f"keys-{number}"), table, number_parts(table["key"].to_numpy(), ranges), ranges)
    return number + 1


def _rows_left_out(table: pa.Table, part: Part) -> tuple[NDArray[np.int64], list[str]]:
    """The rows of a part that are left out, ascending, each with the first of its reasons."""
    codes, rows = table["reason"].to_numpy(), table["row"].to_numpy()
    order = np.lexsort((codes, rows))
    order = order[np.isin(codes[order], OF_PART[part])]
    rows, first = np.unique(rows[order], return_index=True)
    return rows, [REASONS[code] for code in codes[order][first]]


def _named(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    """Batches whose ids, and domains where there are none, tell the source's name, if it has one."""
    for batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for ids in columns.keys() & {"id", "query_id", "document_id"} if name else ():
            columns[ids] = pc.binary_join_element_wise(_prefix(name), columns[ids], "")
        if name and "domain" in columns:
            columns["domain"] = pc.if_else(pc.equal(columns["domain"], ""), name, columns["domain"])
        yield pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def write_part(
    writer: ShardWriter, part: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], number: int
) -> int:
    """Writes ``<part>/<number>.parquet``, without a row only the first; returns the number of rows."""
    coded: Any = ["domain", "split"]  # pyarrow's signature knows only True and False
    name, rows = f"{part}/{number:05d}.parquet", 0
    with pq.ParquetWriter(writer.path(name), schema, compression="zstd", use_dictionary=coded) as file:
        for batch in filter(len, batches):
            file.write_batch(batch, row_group_size=_ROWS_PER_GROUP)
            rows += len(batch)
    if rows or not number:
        writer.add(name)
    return rows
