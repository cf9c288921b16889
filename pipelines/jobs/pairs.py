"""`raytriever pairs`: the judged positives of a collection's split as training pairs."""

import pyarrow.parquet as pq

from raytriever.pipelines.pairs import PAIRS, pairs_from_judgments
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig


class PairsConfig(StageConfig):
    """Which judgments become pairs."""

    collection: InputPath
    split: str = "train"
    minimum_relevance: int = 1


class Pairs(Stage[PairsConfig]):
    """qrels to pairs."""

    command = "pairs"
    kind = PAIRS
    config_class = PairsConfig
    unit = "pairs"

    def plan(self) -> list[Shard]:
        """One shard; refuses a split that isn't there."""
        StoredCollection(self.config.collection).judgments(self.config.split)
        return [Shard("all")]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Writes ``pairs/00000.parquet``."""
        collection = StoredCollection(self.config.collection)
        documents = collection.rows_of("documents").read(["id", "domain"])
        table = pairs_from_judgments(
            collection.judgments(self.config.split),
            collection.rows_of("queries").read(["id"])["id"].combine_chunks(),
            documents["id"].combine_chunks(),
            documents["domain"].combine_chunks(),
            self.config.minimum_relevance,
        )
        name = "pairs/00000.parquet"
        pq.write_table(table, writer.path(name), compression="zstd")
        writer.add(name)
        counts = {"queries": len(table["query_row"].unique()), "documents": len(table["document_row"].unique())}
        return writer.commit(len(table), counts=counts)

    def summary(self, artifact: Artifact) -> str:
        """Pairs, distinct queries, distinct documents."""
        counts = artifact.manifest["counts"]
        return f"{artifact.rows:,} pairs of {counts['queries']:,} queries and {counts['documents']:,} documents"
