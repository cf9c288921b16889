"""`raytriever pack`: clusters to equal batches within one domain, a new packing for every epoch."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.clusters import CLUSTERS, read_clusters
from raytriever.pipelines.packing import PackingSettings, pack
from raytriever.pipelines.pairs import PAIRS, read_pairs
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.vectors import StoredVectors

PACKING = "packing"


class PackConfig(StageConfig):
    """How clusters become batches. ``pairs`` and ``vectors`` are needed for the swap polish alone."""

    clusters: InputPath
    pairs: InputPath | None = None
    vectors: InputPath | None = None
    packing: PackingSettings
    epochs: int = Field(default=1, gt=0)
    seed: int = 0


class Pack(Stage[PackConfig]):
    """A shard is an epoch."""

    command = "pack"
    kind = PACKING
    config_class = PackConfig
    unit = "examples"

    def plan(self) -> list[Shard]:
        """One shard an epoch; refuses a polish without the vectors it needs."""
        Artifact(self.config.clusters, CLUSTERS)
        if self.config.packing.polish_sweeps and not (self.config.vectors and self.config.pairs):
            raise UserError("packing.polish_sweeps needs 'pairs' and 'vectors'. Name both artifacts, or set it to 0.")
        return [Shard(f"epoch={epoch:05d}", {"epoch": epoch}) for epoch in range(self.config.epochs)]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Packs one epoch; a row of the file is an example, ``batch_size`` rows after one another are a batch."""
        epoch = shard.description["epoch"]
        clusters = Artifact(self.config.clusters, CLUSTERS)
        domains = read_clusters(clusters)
        pairs = np.concatenate([domain.pairs for domain in domains])
        assignments = np.concatenate([domain.clusters for domain in domains])
        labels = np.repeat(np.arange(len(domains)), [len(domain.pairs) for domain in domains])
        packing = pack(
            assignments,
            labels,
            [np.asarray(domain.centroids) for domain in domains],
            self.config.packing,
            self.config.seed,
            epoch,
            vectors=self._vectors(pairs) if self.config.packing.polish_sweeps else None,
        )
        rows = packing.batches.ravel()
        names = pa.array([domain.name for domain in domains])
        table = pa.table(
            {
                "pair": pairs[rows],
                "cluster": assignments[rows].astype(np.int32),
                "domain": pa.DictionaryArray.from_arrays(pa.array(labels[rows], pa.int32()), names),
            }
        )
        name = f"{shard.name}/packing.parquet"
        pq.write_table(table, writer.path(name), compression="zstd")
        writer.add(name)
        left_out = len(pairs) - len(rows)
        return writer.commit(
            len(rows),
            counts={"batches": len(packing.batches)},
            dropped={"pairs that fill no batch of their domain in an epoch": left_out} if left_out else {},
            facts={
                "epoch": epoch,
                "batch_size": self.config.packing.batch_size,
                "origins": {"pairs": clusters.manifest["inputs"]["pairs"]},
            },
        )

    def _vectors(self, pairs: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        assert self.config.pairs is not None
        assert self.config.vectors is not None
        artifact, vectors = Artifact(self.config.pairs, PAIRS), StoredVectors(self.config.vectors)
        require_same_origin("pairs", Artifact(self.config.clusters, CLUSTERS), artifact)
        require_same_origin("collection", artifact, vectors)
        rows = read_pairs(artifact, ["query_row", "document_row"]).take(pa.array(pairs))
        documents = vectors.part("documents").gather(rows["document_row"].to_numpy())
        return documents, vectors.part("queries").gather(rows["query_row"].to_numpy())

    def facts(self, records: list[ShardRecord]) -> dict[str, object]:
        """Which pairs the numbers mean."""
        return {"origins": records[0].facts["origins"]}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        config = artifact.config
        return (
            f"{artifact.manifest['counts']['batches']:,} batches of {config['packing']['batch_size']} in"
            f" {config['epochs']} epoch{'s' if config['epochs'] > 1 else ''}"
        )
