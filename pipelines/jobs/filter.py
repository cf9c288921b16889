"""`raytriever filter`: masks false negatives and writes the batches that training reads."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.batches import BATCHES, SCHEMA
from raytriever.pipelines.false_negatives import FalseNegativeSettings, false_negative_mask, positive_keys, to_columns
from raytriever.pipelines.jobs.pack import PACKING
from raytriever.pipelines.pairs import PAIRS, read_pairs
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.vectors import StoredVectors


class FilterConfig(StageConfig):
    """What the batches are made of. ``vectors`` are the surrogate's, which judges what is a false negative."""

    packing: InputPath
    pairs: InputPath
    collection: InputPath
    vectors: InputPath
    false_negatives: FalseNegativeSettings = FalseNegativeSettings()
    batches_per_shard: int = Field(default=1_000, gt=0)


class Filter(Stage[FilterConfig]):
    """A shard is a run of batches of one epoch: their texts, their mask, one row group each."""

    command = "filter"
    kind = BATCHES
    config_class = FilterConfig
    unit = "examples"

    def plan(self) -> list[Shard]:
        """Runs of batches; refuses inputs that don't belong together."""
        packing = Artifact(self.config.packing, PACKING)
        pairs = Artifact(self.config.pairs, PAIRS)
        require_same_origin("pairs", packing, pairs)
        require_same_origin(
            "collection", StoredCollection(self.config.collection), pairs, StoredVectors(self.config.vectors)
        )
        shards = []
        for record in packing.shards:
            epoch, size = record.facts["epoch"], record.facts["batch_size"]
            starts = range(0, record.rows // size, self.config.batches_per_shard)
            shards += [
                Shard(
                    f"epoch={epoch:05d}-{number:05d}", {"epoch": epoch, "number": number, "first": first, "size": size}
                )
                for number, first in enumerate(starts)
            ]
        return shards

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Examples of the packing."""
        return Artifact(self.config.packing, PACKING).rows

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Writes one file of batches."""
        epoch, size = shard.description["epoch"], shard.description["size"]
        packed = pq.read_table(Artifact(self.config.packing, PACKING).path(f"epoch={epoch:05d}/packing.parquet"))
        packed = packed.slice(shard.description["first"] * size, self.config.batches_per_shard * size)
        columns = ["query_id", "document_id", "query_row", "document_row"]
        all_pairs = read_pairs(Artifact(self.config.pairs, PAIRS), columns)
        known_positives = positive_keys(all_pairs["query_row"].to_numpy(), all_pairs["document_row"].to_numpy())
        pairs = all_pairs.take(packed["pair"])
        collection, vectors = StoredCollection(self.config.collection), StoredVectors(self.config.vectors)
        query_rows, document_rows = pairs["query_row"].to_numpy(), pairs["document_row"].to_numpy()
        queries = collection.texts("queries", query_rows)
        documents = collection.texts("documents", document_rows)
        query_part, document_part = vectors.part("queries"), vectors.part("documents")

        masked: list[NDArray[np.int32]] = []
        removed: dict[str, int] = {}
        for start in range(0, len(packed), size):
            batch = slice(start, start + size)
            mask, counts = false_negative_mask(
                query_part.gather(query_rows[batch]),
                document_part.gather(document_rows[batch]),
                self.config.false_negatives,
                queries=query_rows[batch],
                documents=document_rows[batch],
                query_texts=_hashes(queries[batch]),
                document_texts=_hashes(documents[batch]),
                known_positives=known_positives,
            )
            masked.extend(to_columns(mask))
            for rule, count in counts.items():
                removed[rule] = removed.get(rule, 0) + count

        name = f"epoch={epoch:05d}/batches-{shard.description['number']:05d}.parquet"
        empty = pa.array([[]] * len(packed), pa.list_(pa.string()))
        table = pa.table(
            {
                "query_id": pairs["query_id"],
                "query": queries,
                "document_id": pairs["document_id"],
                "document": documents,
                "hard_negative_ids": empty,
                "hard_negatives": empty,
                "masked": pa.array(masked, pa.list_(pa.int32())),
                "domain": packed["domain"].cast(pa.string()),
                "cluster": packed["cluster"],
            }
        ).cast(SCHEMA)
        pq.write_table(table, writer.path(name), row_group_size=size, compression="zstd")
        writer.add(name)
        batches = len(table) // size
        counts = {f"masked by {rule}": count for rule, count in removed.items()}
        return writer.commit(
            len(table),
            counts={"batches": batches, "negatives": batches * size * (size - 1), **counts},
            facts={"epoch": epoch, "batches": batches, "batch_size": size},
        )

    def summary(self, artifact: Artifact) -> str:
        """Batches and the share of negatives left out."""
        counts = artifact.manifest["counts"]
        masked = sum(count for name, count in counts.items() if name.startswith("masked by"))
        return f"{counts['batches']:,} batches, {masked / max(counts['negatives'], 1):.2%} of negatives masked"


def _hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    """64 bits of each text's hash: equal texts are found without comparing them."""
    digests = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=np.uint64)
