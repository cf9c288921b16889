"""`raytriever index`: a sharded FAISS index over vectors, or a BM25 index over texts."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.stored import StoredCollection, text_columns, texts_of
from raytriever.retrieval.configuration import InputPath, Settings
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lexical import BM25Settings, LexicalIndex
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.vector_index import build_shard, set_threads, train, write_index
from raytriever.retrieval.vectors import StoredVectors

INDEX = "index"
_TRAINED = "trained.faiss"


class VectorIndexSettings(Settings):
    """A FAISS factory string over document vectors, cut into ``shards`` runs of rows; inner product."""

    kind: Literal["vectors"] = "vectors"
    vectors: InputPath
    factory: str = "Flat"
    shards: int = Field(default=2, gt=0)
    training_sample: int = Field(default=262_144, gt=0)  # vectors that IVF and PQ learn from
    seed: int = 0


class LexicalIndexSettings(Settings):
    """BM25 over a collection's documents."""

    kind: Literal["lexical"] = "lexical"
    collection: InputPath
    bm25: BM25Settings = BM25Settings()


class IndexConfig(StageConfig):
    """Which index."""

    index: Annotated[VectorIndexSettings | LexicalIndexSettings, Field(discriminator="kind")]


class Index(Stage[IndexConfig]):
    """One task a shard; what quantizers learn is learnt once, before, from a sample."""

    command = "index"
    kind = INDEX
    config_class = IndexConfig
    unit = "documents"

    def plan(self) -> list[Shard]:
        """A training shard, then a shard for each run of rows."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            return [Shard("00000", {"start": 0, "stop": StoredCollection(settings.collection).count("documents")})]
        total = len(StoredVectors(settings.vectors).part("documents"))
        if settings.shards > total:
            raise UserError(f"{settings.shards} index shards were asked for, but there are only {total} documents.")
        size = math.ceil(total / settings.shards)
        runs = [(start, min(start + size, total)) for start in range(0, total, size)]
        training = Shard("training", phase=0, intermediate=True)
        return [training] + [
            Shard(f"{number:05d}", {"start": start, "stop": stop}, phase=1) for number, (start, stop) in enumerate(runs)
        ]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Builds one shard (or, first, trains what all shards share)."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            return self._make_lexical(settings, shard, writer)
        set_threads(max(1, int(self.config.resources.cpus)))
        vectors = StoredVectors(settings.vectors).part("documents")
        if shard.name == "training":
            rng = np.random.default_rng(settings.seed)
            count = min(settings.training_sample, len(vectors))
            sample = np.sort(rng.choice(len(vectors), size=count, replace=False))
            path = writer.path(_TRAINED)
            path.write_bytes(train(vectors.gather(sample), settings.factory, settings.seed))
            writer.add(_TRAINED)
            return writer.commit(0)
        start, stop = shard.description["start"], shard.description["stop"]
        trained = writer.read(_TRAINED)
        index = build_shard(vectors.range(start, stop), settings.factory, trained=trained)
        name = f"shards/{shard.name}.faiss"
        write_index(index, writer.path(name))
        writer.add(name)
        return self._commit(shard, vectors.ids()[start:stop], writer)

    def _make_lexical(self, settings: LexicalIndexSettings, shard: Shard, writer: ShardWriter) -> ShardRecord:
        rows = StoredCollection(settings.collection).rows_of("documents")
        ids: list[str] = []

        def texts() -> Iterator[str]:
            for table in rows.tables(["id", *text_columns("documents")]):
                ids.extend(table["id"].to_pylist())
                yield from texts_of(table, "documents")

        folder = writer.path("lexical/index").parent
        LexicalIndex.build(texts(), settings.bm25).save(folder)
        for path in sorted(folder.iterdir()):
            writer.add(f"lexical/{path.name}")
        return self._commit(shard, ids, writer)

    def _commit(self, shard: Shard, ids: list[str], writer: ShardWriter) -> ShardRecord:
        name = f"ids/{shard.name}.parquet"
        pq.write_table(pa.table({"id": ids}), writer.path(name), compression="zstd")
        writer.add(name)
        return writer.commit(len(ids), facts={"first_row": shard.description["start"]})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """What the index belongs to: its collection, and the encoder whose queries it answers."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            return {"origins": {"collection": StoredCollection(settings.collection).fingerprint}}
        vectors = StoredVectors(settings.vectors)
        collection = require_same_origin("collection", vectors)
        return {"origins": {"collection": collection}, "encoder": vectors.contract.model_dump()}

    def summary(self, artifact: Artifact) -> str:
        """Documents and what the index is."""
        index = artifact.config["index"]
        if index["kind"] == "lexical":
            return f"{artifact.rows:,} documents, BM25"
        return f"{artifact.rows:,} documents, {index['factory']}, {len(artifact.shards)} shards"


def index_ids(artifact: Artifact) -> list[str]:
    """Document ids of an index, in row order."""
    ids: list[str] = []
    for name in artifact.names("ids/"):
        ids.extend(pq.read_table(artifact.path(name))["id"].to_pylist())
    return ids


def lexical_folder(artifact: Artifact, scratch: Path) -> Path:
    """A local folder with the files of a BM25 index."""
    folder = scratch / "lexical"
    folder.mkdir(parents=True, exist_ok=True)
    for name in artifact.names("lexical/"):
        target = folder / name.removeprefix("lexical/")
        if not target.exists():
            target.symlink_to(artifact.path(name))
    return folder
