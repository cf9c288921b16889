"""`raytriever index`: a sharded FAISS index over vectors, or a BM25 index over texts."""

import io
import json
import math
import re
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ByteSize, Field, NonNegativeInt, PositiveInt

from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.artifacts.long_columns import joined
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, Settings
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages
from retrieval.collections.collection import StoredCollection, text_columns, texts_of
from retrieval.encoders.contextual.contexts import copy_context
from retrieval.indexes.faiss_factory import Index as FaissIndex
from retrieval.indexes.faiss_factory import (
    bytes_per_vector,
    empty_index,
    fewest_to_learn_from,
    index_of_any_dimension,
    require_gpu_form,
)
from retrieval.lexical import ARRAYS, WORDS, BM25Settings, WordCounts, bm25_scores, sum_frequencies
from retrieval.rankings import require_names
from retrieval.vectors import StoredVectors, VectorRows

INDEX = "index"
_TRAINED = "trained.faiss"
_COUNTS, _SUMMED = "counts", "sums/words.parquet"
_COUNTED = ("counts", "indices", "indptr")
_TEXTS_AT_ONCE = 1_000  # the rows of a row group
_BLOCK_ROWS = 16_384
_IDS_AT_ONCE = 1 << 19
# FAISS's arrays double as they grow, and old and new are there at once
_BUILDING_FACTOR = 3


class VectorIndexSettings(Settings):
    """A FAISS factory string over document vectors, cut into shards, runs of rows; inner product."""

    kind: Literal["vectors"] = "vectors"
    """An index of vectors."""
    vectors: InputPath
    """The documents' vectors."""
    factory: str = "Flat"
    """FAISS factory string."""
    shards: PositiveInt | None = None
    """Number of shards; each is a run of rows. null: as many as the memory budget requires."""
    memory_budget: ByteSize = Field(default=ByteSize(1 << 30), gt=0)
    """Memory of one worker, such as '512MiB' or '4GiB'. An index takes a third of it, and as much of a GPU's memory."""
    training_sample: PositiveInt = 262_144
    """Most vectors that IVF and PQ learn from."""
    seed: NonNegativeInt = 0
    """Seed of that sample and of k-means."""


class LexicalIndexSettings(Settings):
    """BM25 over a collection's documents."""

    kind: Literal["lexical"] = "lexical"
    """An index of words."""
    collection: InputPath
    """The collection with the documents."""
    with_title: bool = True
    """Whether documents are read with their titles."""
    bm25: BM25Settings = BM25Settings()
    """How texts are analysed and scored."""
    documents_per_shard: PositiveInt = 1 << 18
    """Documents in a shard. Long documents make it fewer, because each word takes about 40 bytes of memory."""


class IndexConfig(StageConfig):
    """The index to build."""

    index: Annotated[VectorIndexSettings | LexicalIndexSettings, Field(discriminator="kind")]
    """An index of vectors or of words, by ``kind``."""


class Rows(NamedTuple):
    """The rows of the index's shard of this ``name``."""

    name: str
    start: int
    stop: int


class Index(Stage[IndexConfig]):
    """One task a shard; before, quantizers learn once from a sample, or words are counted by parts and summed up."""

    command = "index"
    kind = INDEX
    algorithm_version = 5
    config_class = IndexConfig
    unit = "documents"

    @property
    def _gpu(self) -> bool:
        return bool(self.config.resources.gpus_per_worker)

    def check_settings(self, stages: Stages) -> None:  # noqa: ARG002
        """A sample that the index can't learn from; an index that no GPU can build, for a GPU."""
        settings = self.config.index
        if not isinstance(settings, VectorIndexSettings) or (index := index_of_any_dimension(settings.factory)) is None:
            return
        if settings.training_sample < (needed := fewest_to_learn_from(index)):
            raise UserError(
                f"index.training_sample is {settings.training_sample:,}, but '{settings.factory}' learns from at least"
                f" {needed:,} vectors. Raise it."
            )
        if self._gpu:
            require_gpu_form(index, settings.factory)

    def check_inputs(self, there: Set[str]) -> None:
        """Refuses ids that no ranking can hold, too few documents to learn from, and graphs over repeated vectors."""
        settings = self.config.index
        if not there:
            return
        if isinstance(settings, LexicalIndexSettings):
            names = id_blocks(StoredCollection(settings.collection), "documents/")
        else:
            stored = StoredVectors(settings.vectors)
            names = id_blocks(stored, "documents/", ".ids.parquet")
            rows = stored.part("documents")
            index = empty_index(rows.dimension, settings.factory)
            is_graph = re.search("(^|,)HNSW", settings.factory)
            if is_graph and stored.contract.form == "all tokens":
                raise UserError(
                    f"index.factory is '{settings.factory}', a graph, and short documents of {stored.uri} repeat a"
                    " vector until they have as many as long ones. A search can't leave such copies. Take Flat or IVF."
                )
            _require_enough(settings, index, len(rows) * rows.vectors_per_text, stored.uri)
            _require_room(settings, index, rows.dimension)
        require_names(names, "A document id")

    def cost(self, read: Size) -> Cost:
        """A shard of vectors is what fits a worker's memory; BM25 counts the words of as many documents at a time."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            shards = math.ceil(read.documents / settings.documents_per_shard)
            return Cost(replace(read, shards=shards, disk=0.75 * read.texts), 162e-9 * read.texts, shards)
        size = 4 * read.documents * read.dimension
        shards = settings.shards or math.ceil(_BUILDING_FACTOR * size / settings.memory_budget)
        return Cost(replace(read, shards=shards, disk=size), 13e-9 * size, shards if size else 0)

    def phases(self) -> list[Phase]:
        """Facts of all documents, then a shard for each run of rows."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            documents = StoredCollection(settings.collection).count("documents")
            if not documents:
                raise UserError(f"{settings.collection} has no document for BM25. Collect from a source that has some.")
            parts = _runs_of_rows([*range(0, documents, settings.documents_per_shard), documents])
            return [
                Phase(_COUNTS, parts, self._count_words),
                Phase("sums", WHOLE, self._sum_words),
                Phase("", parts, self._score_words, intermediate=False),
            ]
        stored = StoredVectors(settings.vectors)
        vectors = stored.part("documents")
        vectors.require_all()
        total = len(vectors)
        if settings.shards and settings.shards > total:
            raise UserError(f"{settings.shards} index shards were asked for, but there are only {total} documents.")
        count = settings.shards or math.ceil(total / _rows_that_fit(settings, vectors))
        bounds = [total * number // count for number in range(count + 1)]
        return [
            Phase("training", WHOLE, self._train),
            Phase("", _runs_of_rows(bounds), self._build, intermediate=False),
        ]

    def _set_threads(self) -> None:
        from retrieval.indexes.vector_index import set_threads

        set_threads(self.config.resources.cpus)

    def _train(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Makes what all shards share: the trained index."""
        from retrieval.indexes.vector_index import train

        settings = self.config.index
        assert isinstance(settings, VectorIndexSettings)
        self._set_threads()
        sample = _training_sample(settings, StoredVectors(settings.vectors).part("documents"))
        writer.add_bytes(_TRAINED, train(sample, settings.factory, settings.seed, gpu=self._gpu))
        return writer.commit()

    def _build(self, rows: Rows, writer: ShardWriter) -> ShardRecord:
        """One shard of vectors."""
        from retrieval.indexes.vector_index import build_shard, write_index

        settings, (name, start, stop) = self.config.index, rows
        assert isinstance(settings, VectorIndexSettings)
        self._set_threads()
        vectors = StoredVectors(settings.vectors).part("documents")
        rows_at_once = max(1, _BLOCK_ROWS // vectors.vectors_per_text)
        blocks = (block.reshape(-1, vectors.dimension) for _, block in vectors.blocks(rows_at_once, start, stop))
        index = build_shard(blocks, settings.factory, trained=writer.read(_TRAINED), gpu=self._gpu)
        write_index(index, writer.path(f"shards/{name}.faiss"))
        writer.add(f"shards/{name}.faiss")
        if start == 0:
            copy_context(StoredVectors(settings.vectors), writer)  # the encoder for queries
        writer.add_table(f"ids/{name}.parquet", pa.table({"id": vectors.ids(start, stop)}))
        return writer.commit(stop - start, facts={"first_row": start})

    def _count_words(self, rows: Rows, writer: ShardWriter) -> ShardRecord:
        """The words of a part's documents."""
        settings, ids = self.config.index, list[pa.Array]()
        assert isinstance(settings, LexicalIndexSettings)
        documents = StoredCollection(settings.collection).rows_of("documents")

        def texts() -> Iterator[str]:
            for start in range(rows.start, rows.stop, _TEXTS_AT_ONCE):
                chosen = np.arange(start, min(start + _TEXTS_AT_ONCE, rows.stop))
                table = documents.take(chosen, ["id", *text_columns("documents")])
                ids.extend(table["id"].chunks)
                yield from texts_of(table, "documents", with_title=settings.with_title)

        part = WordCounts.of(texts(), settings.bm25)
        writer.add_table(WORDS.format(rows.name), part.frequencies())
        for array, values in zip(_COUNTED, (part.counts.data, part.counts.indices, part.counts.indptr), strict=True):
            writer.add_array(ARRAYS.format(rows.name, array), values)
        writer.add_table(f"ids/{rows.name}.parquet", pa.table({"id": joined(ids)}))
        return writer.commit()

    def _sum_words(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Sums the words of all parts."""
        parts: list[Rows] = list(self._phases[_COUNTS].tasks)
        writer.add_table(_SUMMED, sum_frequencies(_table(writer, WORDS.format(part.name)) for part in parts))
        return writer.commit()

    def _score_words(self, rows: Rows, writer: ShardWriter) -> ShardRecord:
        """One shard of words: a part scored by the counts of all."""
        from scipy.sparse import csc_array

        settings, (name, start, stop) = self.config.index, rows
        assert isinstance(settings, LexicalIndexSettings)
        words = _table(writer, WORDS.format(name))["word"].to_pylist()
        arrays = (np.load(io.BytesIO(writer.read(ARRAYS.format(name, array)))) for array in _COUNTED)
        part = WordCounts(words, csc_array(tuple(arrays), (stop - start, len(words))))
        documents = StoredCollection(settings.collection).count("documents")
        scores = bm25_scores(part, _table(writer, _SUMMED), documents, settings.bm25)
        writer.add_array(ARRAYS.format(name, "scores"), scores.data)
        counted = ShardRecord.from_json(json.loads(writer.read(f"{RECORDS}{_COUNTS}-{name}.json")))
        writer.adopt([file for file in counted.files if file.name != ARRAYS.format(name, "counts")])
        return writer.commit(stop - start, facts={"first_row": start})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The index's collection, and the encoder of its queries."""
        settings = self.config.index
        if isinstance(settings, LexicalIndexSettings):
            collection = StoredCollection(settings.collection).fingerprint
            return {"origins": {"collection": collection}, "with_title": settings.with_title}
        vectors = StoredVectors(settings.vectors)
        return {
            "origins": {"collection": require_same_origin("collection", vectors)},
            "encoder": vectors.contract.model_dump(),
            "with_title": vectors.with_title,
            "vectors_per_document": vectors.part("documents").vectors_per_text,
        }

    def summary(self, artifact: Artifact) -> str:
        """Documents and what the index is."""
        index = artifact.config["index"]
        if index["kind"] == "lexical":
            return f"{artifact.rows:,} documents, BM25"
        return f"{artifact.rows:,} documents, {index['factory']}, {counted(len(artifact.shards), 'shard')}"


def _require_enough(settings: VectorIndexSettings, index: "FaissIndex", found: int, where: str) -> None:
    """Raises ``UserError`` where the ``found`` vectors of the documents in ``where`` are too few to train the index."""
    needed = fewest_to_learn_from(index)
    if found < needed:
        raise UserError(
            f"index.factory is '{settings.factory}', which learns from at least {needed:,} vectors, but the"
            f" documents of {where} have {found:,}. Set index.factory to Flat, which learns nothing, and set"
            " search_parameters of the stages that search it to null."
        )


def _require_room(settings: VectorIndexSettings, index: "FaissIndex", dimension: int) -> None:
    """Raises ``UserError`` where the memory budget doesn't hold the vectors that the index learns from."""
    needed, held = fewest_to_learn_from(index), _within_budget(settings, dimension)
    if held < needed:
        raise UserError(
            f"index.factory is '{settings.factory}', which learns from at least {needed:,} vectors, and"
            f" index.memory_budget, {settings.memory_budget:,} bytes, holds {held:,}. Raise it."
        )


def _within_budget(settings: VectorIndexSettings, dimension: int) -> int:
    """Vectors that can be learnt from at once."""
    return settings.memory_budget // (_BUILDING_FACTOR * 4 * dimension)


def _table(writer: ShardWriter, name: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(writer.read(name)))


def _runs_of_rows(bounds: list[int]) -> list[Rows]:
    return [Rows(f"{number:05d}", start, stop) for number, (start, stop) in enumerate(pairwise(bounds))]


def _rows_that_fit(settings: VectorIndexSettings, vectors: VectorRows) -> int:
    """Documents of one shard. Raises ``UserError`` where the budget doesn't hold the blocks that are read."""
    reading = 2 * 4 * _BLOCK_ROWS * vectors.dimension
    document = bytes_per_vector(settings.factory, vectors.dimension) * vectors.vectors_per_text
    rows = (settings.memory_budget - reading) // (_BUILDING_FACTOR * document)
    if rows < 1:
        needed = ByteSize(reading + _BUILDING_FACTOR * document * 1000).human_readable()
        raise UserError(
            f"index.memory_budget is {settings.memory_budget.human_readable()}, too little for a shard of vectors"
            f" of dimension {vectors.dimension}. Give at least {needed}."
        )
    return int(rows)


def _training_sample(settings: VectorIndexSettings, vectors: VectorRows) -> Any:
    """Vectors of documents drawn without replacement, within the memory budget."""
    per_text = vectors.vectors_per_text
    count = max(1, min(settings.training_sample, _within_budget(settings, vectors.dimension)) // per_text)
    rng = np.random.default_rng(settings.seed)
    chosen = np.sort(rng.choice(len(vectors), size=min(count, len(vectors)), replace=False))
    return vectors.gather(chosen).reshape(-1, vectors.dimension)


def id_blocks(artifact: Artifact, prefix: str = "ids/", suffix: str = ".parquet") -> Iterator[pa.Array]:
    """The column ``id`` of an artifact's files, by default an index's, in row order, some rows at a time.

    Of an object store's files nothing else is fetched.
    """
    for name in artifact.names(prefix, suffix):
        for batch in pq.ParquetFile(artifact.open(name)).iter_batches(_IDS_AT_ONCE, columns=["id"]):
            yield batch.column(0)
