"""`raytriever cluster`: asymmetric k-means over pairs, within each domain."""

import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.clusters import CLUSTERS
from raytriever.pipelines.kmeans import KMeansSettings, cluster_pairs, number_of_clusters
from raytriever.pipelines.packing import SmallDomains, group_domains
from raytriever.pipelines.pairs import PAIRS, read_pairs
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.vectors import StoredVectors


class ClusterConfig(StageConfig):
    """How pairs are clustered. ``cluster_size`` is the average: K = ceil(pairs / cluster_size) in each domain."""

    pairs: InputPath
    vectors: InputPath
    cluster_size: int = Field(default=64, gt=0)
    smallest_domain: int = Field(default=64, gt=0)  # pairs; the batch size, since a domain must fill one batch
    small_domains: SmallDomains = "refuse"
    kmeans: KMeansSettings = KMeansSettings()
    seed: int = 0


class Cluster(Stage[ClusterConfig]):
    """A shard is a domain (or the small domains merged)."""

    command = "cluster"
    kind = CLUSTERS
    config_class = ClusterConfig
    unit = "pairs"

    def _groups(self) -> tuple[NDArray[np.int64], list[str]]:
        domains = read_pairs(Artifact(self.config.pairs, PAIRS), ["domain"])["domain"].to_numpy()
        groups = group_domains(domains, self.config.smallest_domain, self.config.small_domains)
        return groups.labels, list(groups.names)

    def plan(self) -> list[Shard]:
        """One shard a domain; refuses small domains unless told what to do with them."""
        require_same_origin("collection", Artifact(self.config.pairs, PAIRS), StoredVectors(self.config.vectors))
        labels, names = self._groups()
        left_out = int((labels < 0).sum())
        return [
            Shard(f"{number:05d}", {"number": number, "name": name, "left_out": left_out if number == 0 else 0})
            for number, name in enumerate(names)
        ]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Clusters one domain's pairs; writes assignments and centroids."""
        number, name = shard.description["number"], shard.description["name"]
        labels, _ = self._groups()
        pairs = np.flatnonzero(labels == number)
        rows = read_pairs(Artifact(self.config.pairs, PAIRS), ["query_row", "document_row"]).take(pa.array(pairs))
        vectors = StoredVectors(self.config.vectors)
        documents = vectors.part("documents").gather(rows["document_row"].to_numpy())
        queries = vectors.part("queries").gather(rows["query_row"].to_numpy())
        k = number_of_clusters(len(pairs), self.config.cluster_size)
        seed = self.config.seed ^ zlib.crc32(name.encode())  # of the domain, whatever its place among the others
        clustering = cluster_pairs(documents, queries, k, self.config.kmeans, seed)
        base = f"domains/{number:05d}"
        table = pa.table({"pair": pairs, "cluster": clustering.assignments.astype(np.int32)})
        pq.write_table(table, writer.path(f"{base}.parquet"), compression="zstd")
        np.save(writer.path(f"{base}.centroids.npy"), clustering.centroids.astype(np.float32))
        writer.add(f"{base}.parquet")
        writer.add(f"{base}.centroids.npy")
        used = len(np.unique(clustering.assignments))
        left_out = shard.description["left_out"]
        return writer.commit(
            len(pairs),
            counts={"clusters": len(clustering.centroids), "used_clusters": used},
            dropped={"pairs of small domains": left_out} if left_out else {},
            facts={"domain": name, "iterations": int(clustering.iterations)},
        )

    def summary(self, artifact: Artifact) -> str:
        """Pairs, clusters, domains."""
        counts = artifact.manifest["counts"]
        return f"{artifact.rows:,} pairs in {counts['clusters']:,} clusters of {len(artifact.shards):,} domains"
