"""`raytriever lsa`: vectors of documents and queries without a neural encoder, by latent semantic analysis."""

import hashlib
import io
import json
import zlib
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field
from scipy.sparse import csr_array, vstack

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, to_json
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of
from retrieval.encoders.specification import EncoderContract
from retrieval.latent_semantics import (
    TermStatistics,
    TermWeighting,
    Weights,
    merge_statistics,
    most_frequent,
    project,
    truncated_svd,
    unit_rows,
)
from retrieval.lexical import BM25Settings
from retrieval.vectors import VECTORS

_COUNTED_IN_A_SHARD = 65_536  # documents
_TEXTS_AT_ONCE = 4_096
_MOST_PARTS = 16  # of the vocabulary, so that the distinct terms of a whole corpus are never in memory at once
_STATISTICS, _COMPONENTS, _FIT = "fit/terms.parquet", "fit/components.npy", "fit/fit.json"
_NAMED = 3  # ids of texts without a vector in the manifest, of each shard


class LsaConfig(StageConfig):
    """What is analysed and how. ``bm25`` says how texts become terms; its k1 and b are for weights bm25 alone."""

    collection: InputPath
    weights: Weights = "tfidf"
    bm25: BM25Settings = BM25Settings()
    dimension: int = Field(default=256, gt=0)
    sample: int = Field(default=100_000, gt=0)  # texts that the decomposition is learnt from, at most
    min_df: int = Field(default=2, gt=0)  # documents that a term must be in
    max_features: int = Field(default=131_072, gt=0)  # terms; of more, those in most documents
    parts: tuple[TextPart, ...] = ("documents", "queries")
    with_title: bool = True
    dtype: Literal["float16", "float32"] = "float16"  # of the stored vectors
    texts_per_shard: int = Field(default=16_384, gt=0)
    seed: int = Field(default=0, ge=0)


class _Fit(NamedTuple):
    """What is learnt once: how texts become weights, and the right singular vectors (terms, dimension)."""

    weighting: TermWeighting
    components: NDArray[np.float32]
    facts: dict[str, Any]


class Lsa(Stage[LsaConfig]):
    """Counts terms by stretches of documents, learns the decomposition from a sample, then projects range by range."""

    command = "lsa"
    kind = VECTORS
    config_class = LsaConfig
    unit = "texts"
    keeps_state = True  # what was learnt is read once a worker

    def __init__(self, config: LsaConfig) -> None:
        super().__init__(config)
        self._fit: _Fit | None = None
        self._rows: dict[TextPart, ParquetRows] = {}

    def plan(self) -> list[Shard]:
        """Stretches to count, the fit, and ranges of rows of each part."""
        collection = StoredCollection(self.config.collection)
        documents = collection.count("documents")
        if not documents or not self.total_rows([]):
            raise UserError(
                f"{collection.uri} has {documents} documents and {collection.count('queries')} queries: of"
                f" {' and '.join(self.config.parts)} no vectors can be made. Documents are needed in any case, for the"
                " frequencies of their terms."
            )
        stretches = _ranges(documents, _COUNTED_IN_A_SHARD)
        shards = [
            Shard(f"counts-{number:05d}", {"rows": rows, "number": number}, intermediate=True)
            for number, rows in enumerate(stretches)
        ]
        shards.append(Shard("fit", {"stretches": len(stretches)}, phase=1, intermediate=True))
        for part in self.config.parts:
            shards += [
                Shard(f"{part}-{number:05d}", {"part": part, "number": number, "rows": rows}, phase=2)
                for number, rows in enumerate(_ranges(collection.count(part), self.config.texts_per_shard))
            ]
        return shards

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Texts of all parts."""
        collection = StoredCollection(self.config.collection)
        return sum(collection.count(part) for part in self.config.parts)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One stretch's counts, the fit, or one range's vectors."""
        if shard.phase == 0:
            return self._count(shard, writer)
        return self._learn(shard, writer) if shard.phase == 1 else self._project(shard, writer)

    def _count(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        statistics = TermStatistics(self.config.bm25)
        start, stop = shard.description["rows"]
        for first in range(start, stop, _TEXTS_AT_ONCE):
            statistics.add(self._texts("documents", np.arange(first, min(first + _TEXTS_AT_ONCE, stop))))
        table = statistics.table()
        parts = self._vocabulary_parts()
        part_of = np.array([zlib.crc32(term.encode()) % parts for term in table["term"].to_pylist()], dtype=np.int64)
        for part in range(parts):
            name = _counts_name(shard.description["number"], part)
            pq.write_table(table.filter(pa.array(part_of == part)), writer.path(name), compression="zstd")
            writer.add(name)
        return writer.commit(0)

    def _vocabulary_parts(self) -> int:
        documents = StoredCollection(self.config.collection).count("documents")
        return min(_MOST_PARTS, len(_ranges(documents, _COUNTED_IN_A_SHARD)))

    def _learn(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        config = self.config
        collection = StoredCollection(config.collection)
        statistics: list[pa.Table] = []
        for part in range(self._vocabulary_parts()):
            names = [_counts_name(number, part) for number in range(shard.description["stretches"])]
            tables = (pq.read_table(pa.BufferReader(writer.read(name))) for name in names)
            merged = merge_statistics(tables, config.min_df, config.max_features)
            statistics = [most_frequent([*statistics, merged], config.max_features)]
        if not len(statistics[0]):
            raise UserError(f"{collection.uri} has no term in {config.min_df} documents or more. Lower min_df.")
        weighting = TermWeighting.from_statistics(
            statistics[0], collection.count("documents"), config.weights, config.bm25
        )
        sample = self._sample_rows(weighting)
        values, components = truncated_svd(sample, config.dimension, config.seed)
        digest = hashlib.sha256("\0".join(weighting.terms).encode())
        for values_of_it in (weighting.idf, components):
            digest.update(np.ascontiguousarray(values_of_it).tobytes())
        total = float(np.square(sample.data, dtype=np.float64).sum())
        facts = {
            "fingerprint": digest.hexdigest(),
            "terms": len(weighting.terms),
            "sample": int(sample.shape[0]),
            "average_length": weighting.average_length,
            "explained": round(float(np.square(values, dtype=np.float64).sum()) / total, 4),
        }
        pq.write_table(statistics[0], writer.path(_STATISTICS), compression="zstd")
        np.save(writer.path(_COMPONENTS), components)
        writer.path(_FIT).write_bytes(to_json(facts))
        for name in (_STATISTICS, _COMPONENTS, _FIT):
            writer.add(name)
        return writer.commit(0)

    def _sample_rows(self, weighting: TermWeighting) -> csr_array:
        """Term weights of texts drawn from all parts without replacement, each at unit length."""
        collection = StoredCollection(self.config.collection)
        counts = [collection.count(part) for part in self.config.parts]
        starts = np.cumsum([0, *counts])
        rng = np.random.default_rng(self.config.seed)
        size = min(self.config.sample, int(starts[-1]))
        chosen = np.sort(rng.choice(int(starts[-1]), size=size, replace=False))
        blocks = []
        for part, start, stop in zip(self.config.parts, starts[:-1], starts[1:], strict=True):
            rows = chosen[(chosen >= start) & (chosen < stop)] - start
            for first in range(0, len(rows), _TEXTS_AT_ONCE):
                texts = self._texts(part, rows[first : first + _TEXTS_AT_ONCE])
                blocks.append(unit_rows(weighting.rows(texts)))
        return csr_array(vstack(blocks, format="csr"))

    def _project(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        fit = self._learnt(writer)
        part, (start, stop) = shard.description["part"], shard.description["rows"]
        name = f"{part}/{shard.description['number']:05d}"
        vectors = np.empty((stop - start, self.config.dimension), dtype=self.config.dtype)
        for first in range(start, stop, _TEXTS_AT_ONCE):
            last = min(first + _TEXTS_AT_ONCE, stop)
            rows = fit.weighting.rows(self._texts(part, np.arange(first, last)))
            vectors[first - start : last - start] = project(rows, fit.components)
        ids = self._rows[part].take(np.arange(start, stop), ["id"])
        without = np.flatnonzero(~vectors.any(axis=1))
        np.save(writer.path(f"{name}.npy"), vectors)
        pq.write_table(ids, writer.path(f"{name}.ids.parquet"), compression="zstd")
        writer.add(f"{name}.npy")
        writer.add(f"{name}.ids.parquet")
        return writer.commit(
            stop - start,
            counts={part: stop - start} | ({f"{part} without terms": len(without)} if len(without) else {}),
            facts={"fit": fit.facts, "without_terms": ids["id"].take(pa.array(without[:_NAMED])).to_pylist()},
        )

    def _learnt(self, writer: ShardWriter) -> _Fit:
        if self._fit is None:
            statistics = pq.read_table(pa.BufferReader(writer.read(_STATISTICS)))
            documents = StoredCollection(self.config.collection).count("documents")
            weighting = TermWeighting.from_statistics(statistics, documents, self.config.weights, self.config.bm25)
            components = np.load(io.BytesIO(writer.read(_COMPONENTS)))
            self._fit = _Fit(weighting, components, json.loads(writer.read(_FIT)))
        return self._fit

    def _texts(self, part: TextPart, rows: NDArray[np.int64]) -> list[str]:
        if part not in self._rows:
            self._rows[part] = StoredCollection(self.config.collection).rows_of(part)
        table = self._rows[part].take(rows, text_columns(part))
        return texts_of(table, part, with_title=self.config.with_title)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The contract under which these vectors may meet others, and what the decomposition holds."""
        fit = records[0].facts["fit"]
        contract = EncoderContract(
            model=fit["fingerprint"],
            pooling="mean",  # of the vectors of a text's terms, weighted
            normalize=True,
            query_prompt="",
            document_prompt="",
            max_length=0,
            dtype="float32",
            dimension=self.config.dimension,
        )
        return {"encoder": contract.model_dump(), "with_title": self.config.with_title, "fit": fit}

    def summary(self, artifact: Artifact) -> str:
        """Texts, dimension, terms, and the texts that have none of them."""
        fit, counts = artifact.manifest["facts"]["fit"], artifact.manifest["counts"]
        without = sum(count for name, count in counts.items() if name.endswith(" without terms"))
        named = ", ".join([name for shard in artifact.shards for name in shard.facts["without_terms"]][:_NAMED])
        return (
            f"{artifact.rows:,} texts, {artifact.config['dimension']} dimensions of {fit['terms']:,} terms, which hold"
            f" {fit['explained']:.0%} of the sample's weights"
            + (f"; {without:,} texts without a term have zero vectors ({named}, …)" if without else "")
        )


def _ranges(total: int, size: int) -> list[list[int]]:
    return [[start, min(start + size, total)] for start in range(0, total, size)]


def _counts_name(stretch: int, part: int) -> str:
    return f"counts/{stretch:05d}-{part:02d}.parquet"
