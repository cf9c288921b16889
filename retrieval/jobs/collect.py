"""`raytriever collect`: reads a source once and stores it as a collection of documents, queries and judgments."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.beir import BeirFolder
from raytriever.retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, Source
from raytriever.retrieval.collections.python_functions import PythonFunctions
from raytriever.retrieval.collections.stored import COLLECTION, StoredCollection
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig

_ROWS_PER_GROUP = 1_000  # random reads of a row decode one group


class CollectConfig(StageConfig):
    """Which source becomes the collection."""

    source: Annotated[PythonFunctions | BeirFolder, Field(discriminator="kind")]
    rows_per_file: int = Field(default=50_000, gt=0)


class Collect(Stage[CollectConfig]):
    """One pass over the source, in its order, with bounded memory."""

    command = "collect"
    kind = COLLECTION
    config_class = CollectConfig
    unit = "documents"

    def source(self) -> Source:
        """The reader of the configured source."""
        return self.config.source.open()

    def input_fingerprints(self) -> dict[str, str]:
        """One hash over what the source says of its own bytes."""
        described = json.dumps(self.source().fingerprint(), sort_keys=True)
        return {"source": hashlib.sha256(described.encode()).hexdigest()}

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Writes documents, queries, judgments, and what the source says of itself."""
        source = self.source()
        counts: dict[str, int] = {
            "documents": self._write(writer, "documents", DOCUMENTS, source.documents()),
            "queries": self._write(writer, "queries", QUERIES, source.queries()),
            "judgments": self._write(writer, "judgments", JUDGMENTS, source.judgments()),
        }
        facts = {key: value for key, value in source.fingerprint().items() if key != "files"}
        return writer.commit(counts["documents"], counts=counts | source.counts, dropped=source.dropped, facts=facts)

    def _write(self, writer: ShardWriter, part: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        rows, number, room, file = 0, -1, 0, None
        name = ""
        for batch in batches:
            start = 0
            while start < len(batch):
                if file is None:
                    number, room = number + 1, self.config.rows_per_file
                    name = f"{part}/{number:05d}.parquet"
                    file = _open(writer.path(name), schema)
                piece = batch.slice(start, min(room, len(batch) - start))
                file.write_batch(piece, row_group_size=_ROWS_PER_GROUP)
                rows, room, start = rows + len(piece), room - len(piece), start + len(piece)
                if not room:
                    file.close()
                    writer.add(name)
                    file = None
        if file is None and number < 0:
            name = f"{part}/00000.parquet"
            file = _open(writer.path(name), schema)
        if file is not None:
            file.close()
            writer.add(name)
        return rows

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """What the source says of itself (the interpreter's version, say)."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Documents, queries and judgments."""
        stored = StoredCollection(artifact.uri)
        parts: list[str] = [f"{stored.count(part):,} {part}" for part in ("documents", "queries", "judgments")]
        return ", ".join(parts)


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["domain", "split"])
