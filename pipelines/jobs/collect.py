"""`raytriever collect`: reads a source once and stores it as a collection of documents, queries and judgments."""

import hashlib
import json
import sys
from collections.abc import Iterable, Set
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from pipelines.formats.sources import AnySource, JoinedSources
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.collection import COLLECTION, DOCUMENTS, JUDGMENTS, QUERIES, StoredCollection
from retrieval.collections.records import Limits, reading_within

_ROWS_PER_GROUP = 1_000  # random reads of a row decode one group


class CollectConfig(StageConfig):
    """Which source becomes the collection."""

    source: AnySource
    """The source, by its format."""
    rows_per_file: int = Field(default=50_000, gt=0)
    """Rows in a parquet file."""
    limits: Limits = Limits()
    """How large one piece of the source may be."""


class Collect(Stage[CollectConfig]):
    """One pass over each source, in its order, with bounded memory: those of several are a task each."""

    command = "collect"
    kind = COLLECTION
    algorithm_version = 4
    config_class = CollectConfig
    unit = "documents"

    def _names(self) -> list[str]:
        """Of several sources; '' stands for the only one."""
        source = self.config.source
        return sorted(source.sources) if isinstance(source, JoinedSources) else [""]

    def _open(self, name: str) -> CheckedSource:
        source = self.config.source
        return source.open(name) if isinstance(source, JoinedSources) else source.open()

    def check_inputs(self, there: Set[str]) -> None:
        """Opens the source, which names a missing folder, file or split."""
        if input_paths(self.config).keys() <= there and not is_artifact(self.config.output):
            with reading_within(self.config.limits):
                for name in self._names():
                    self._open(name)

    def resolved(self) -> dict[str, Any]:
        """Without ``cross_validation`` where there is none, and without limits, which change nothing that is read."""
        values = super().resolved()
        del values["limits"]
        if values["source"].get("cross_validation", ...) is None:
            del values["source"]["cross_validation"]
        return values

    def input_fingerprints(self) -> dict[str, str]:
        """One hash over what the sources say of their own bytes."""
        found = {name: self._open(name).fingerprint() for name in self._names()}
        return {"source": hashlib.sha256(json.dumps(found.get("", found), sort_keys=True).encode()).hexdigest()}

    def plan(self) -> list[Shard]:
        """Each of several sources, by name; or the one."""
        return [Shard(f"source-{name}" if name else "all", {"name": name}) for name in self._names()]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Writes documents, queries, judgments, and what the source says of itself."""
        with reading_within(self.config.limits):
            return write_collection(self._open(shard.description["name"]), writer, self.config.rows_per_file)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """What the sources say of themselves (the interpreter's version, say)."""
        return {fact: value for record in records for fact, value in record.facts.items()}

    def summary(self, artifact: Artifact) -> str:
        """Documents, queries and judgments, and how much of the source is none of these."""
        stored = StoredCollection(artifact.uri)
        parts: list[str] = [f"{stored.count(part):,} {part}" for part in ("documents", "queries", "judgments")]
        left_out = sum(artifact.manifest["dropped"].values())
        return ", ".join(parts) + (f" ({left_out:,} left out)" if left_out else "")


def write_collection(source: CheckedSource, writer: ShardWriter, rows_per_file: int) -> ShardRecord:
    """Reads the source once, with bounded memory, and commits all that a collection has of it as one shard.

    Of one that has a name its files are in a folder of that name, and what it says of itself begins with it.
    """
    name = f"{source.name}/" if source.name else ""
    counts = {
        part: write_part(writer, f"{part}/{name}".rstrip("/"), schema, batches, rows_per_file)
        for part, schema, batches in (
            ("documents", DOCUMENTS, source.documents()),
            ("queries", QUERIES, source.queries()),
            ("judgments", JUDGMENTS, source.judgments()),
        )
    }
    said = (source.counts, source.dropped, source.facts)
    counted, dropped, facts = ({name + key: value for key, value in of.items()} for of in said)
    return writer.commit(counts["documents"], counts=counts | counted, dropped=dropped, facts=facts)


def write_part(
    writer: ShardWriter,
    part: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    rows_per_file: int = sys.maxsize,
    first: int = 0,
) -> int:
    """Writes ``<part>/<first>.parquet`` and on, one file even without a row; returns the number of rows."""
    coded: Any = ["domain", "split"]  # pyarrow's signature knows only True and False
    waiting, rows = iter(batches), 0
    batch = next(waiting, None)
    for number in count(first):
        name, room = f"{part}/{number:05d}.parquet", rows_per_file
        with pq.ParquetWriter(writer.path(name), schema, compression="zstd", use_dictionary=coded) as file:
            while room and batch is not None:
                piece, rest = batch.slice(0, room), batch.slice(room)
                file.write_batch(piece, row_group_size=_ROWS_PER_GROUP)
                rows, room = rows + len(piece), room - len(piece)
                batch = rest if len(rest) else next(waiting, None)
        writer.add(name)
        if batch is None:
            break
    return rows
