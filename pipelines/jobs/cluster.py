"""`raytriever cluster`: asymmetric k-means over pairs, within each domain."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.clustering.kmeans import Clustering, KMeansSettings, cluster_in_parts, number_of_clusters
from raytriever.pipelines.clustering.parts import LocalParts, Split
from raytriever.pipelines.clustering.stored_pairs import StoredPairs
from raytriever.pipelines.clusters import CLUSTERS, size_histogram
from raytriever.pipelines.packing.domains import groups_of
from raytriever.pipelines.packing.pack import SmallDomains
from raytriever.pipelines.pairs import PAIRS, read_pairs
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.progress import ProgressLine
from raytriever.retrieval.vectors import StoredVectors

LARGE_DOMAIN = 1 << 19  # pairs; a domain of more is clustered by all workers together
_DIGITS = 9  # of recorded costs: what rounding leaves open is not recorded


class ClusterConfig(StageConfig):
    """How pairs are clustered. ``cluster_size`` is the average: K = ceil(pairs / cluster_size) in each domain."""

    pairs: InputPath
    vectors: InputPath
    cluster_size: int = Field(default=64, gt=0)
    smallest_domain: int = Field(default=64, gt=0)  # pairs; the batch size, since a domain must fill one batch
    small_domains: SmallDomains = "refuse"
    kmeans: KMeansSettings = KMeansSettings()
    seed: int = Field(default=0, ge=0)


class Cluster(Stage[ClusterConfig]):
    """A shard is a domain (or the small domains merged): a task each, but large ones are shared by all workers."""

    command = "cluster"
    kind = CLUSTERS
    algorithm_version = 2
    config_class = ClusterConfig
    unit = "pairs"

    @property
    def _device(self) -> str:
        return "cuda" if self.config.resources.gpus_per_worker else "cpu"

    def _labels(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        artifact = Artifact(self.config.pairs, PAIRS)
        if not artifact.rows:
            raise UserError(f"{artifact.uri} holds no pairs, so there is nothing to cluster.")
        groups = groups_of(artifact, self.config.smallest_domain, self.config.small_domains)
        return groups.labels, groups.names

    def plan(self) -> list[Shard]:
        """One shard a domain; refuses small domains unless told what to do with them."""
        vectors = StoredVectors(self.config.vectors)
        require_same_origin("collection", Artifact(self.config.pairs, PAIRS), vectors)
        for part in ("queries", "documents") if self.config.kmeans.sides == "both" else ("queries",):
            if vectors.part(part).vectors_per_text > 1:
                raise UserError(
                    f"{vectors.uri} has {vectors.part(part).vectors_per_text} vectors for each of its {part}; a pair is"
                    " clustered by one a side. Embed with an encoder that gives one."
                )
        labels, names = self._labels()
        sizes = np.bincount(labels[labels >= 0], minlength=len(names))
        left_out = int((labels < 0).sum())
        return [
            Shard(
                f"{number:05d}",
                {
                    "number": number,
                    "name": name,
                    "pairs": int(sizes[number]),
                    "left_out": left_out if number == 0 else 0,
                },
            )
            for number, name in enumerate(names)
        ]

    def total_rows(self, shards: list[Shard]) -> int:
        """Pairs of all domains."""
        return sum(int(shard.description["pairs"]) for shard in shards)

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Small domains side by side, then large ones one after another, each on all workers."""
        large = [shard for shard in pending if shard.description["pairs"] > LARGE_DOMAIN]
        yield from super().execute([shard for shard in pending if shard not in large], session, progress)
        if not large:
            return
        session.start()
        from raytriever.pipelines.jobs.part_workers import PartWorkers

        stage = self.for_workers()
        with PartWorkers(self.config.resources) as workers:
            stage._split = workers.split
            for shard in large:
                record = stage.make_shard(shard)
                progress.advance(record.rows)
                yield record

    _split: Split = LocalParts  # where the parts of a domain are

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Clusters one domain's pairs; writes assignments and centroids."""
        number, name = shard.description["number"], shard.description["name"]
        labels, _ = self._labels()
        pairs = np.flatnonzero(labels == number)
        k = number_of_clusters(len(pairs), self.config.cluster_size)
        seed = self.config.seed ^ zlib.crc32(name.encode("utf-8", "surrogatepass"))  # of the domain, wherever it stands
        clustering = cluster_in_parts(
            self._stored(pairs), k, self.config.kmeans, seed, split=self._split, device=self._device
        )
        base = f"domains/{number:05d}"
        table = pa.table({"pair": pairs, "cluster": clustering.assignments})
        pq.write_table(table, writer.path(f"{base}.parquet"), compression="zstd")
        np.save(writer.path(f"{base}.centroids.npy"), clustering.centroids)
        writer.add(f"{base}.parquet")
        writer.add(f"{base}.centroids.npy")
        left_out = shard.description["left_out"]
        return writer.commit(
            len(pairs),
            counts={"clusters": len(clustering.centroids), "used_clusters": len(clustering.centroids)},
            dropped={"pairs of small domains": left_out} if left_out else {},
            facts={"domain": name, **_facts(clustering, k)},
        )

    def _stored(self, numbers: NDArray[np.int64]) -> StoredPairs:
        artifact = Artifact(self.config.pairs, PAIRS)
        chosen = pa.array(numbers)
        rows = read_pairs(artifact, ["query_row", "document_row"]).take(chosen)

        def name(place: int) -> str:
            ids = read_pairs(artifact, ["query_id", "document_id"]).slice(int(numbers[place]), 1).to_pylist()[0]
            return f"pair {numbers[place]} (query {ids['query_id']!r}, document {ids['document_id']!r})"

        return StoredPairs(
            StoredVectors(self.config.vectors),
            rows["document_row"].to_numpy(),
            rows["query_row"].to_numpy(),
            self.config.kmeans.sides,
            name,
        )

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """What was clustered, and over all domains how many clusters were asked for and what sizes they have."""
        histograms = [record.facts["sizes"] for record in records]
        longest = max(len(histogram) for histogram in histograms)
        return {
            "sides": self.config.kmeans.sides,
            "clusters_asked_for": sum(record.facts["clusters_asked_for"] for record in records),
            "refilled": sum(record.facts["refilled"] for record in records),
            "pairs_with_zero_vectors": sum(record.facts["pairs_with_zero_vectors"] for record in records),
            "sizes": [sum(h[power] for h in histograms if power < len(h)) for power in range(longest)],
        }

    def summary(self, artifact: Artifact) -> str:
        """Pairs, clusters, domains."""
        counts = artifact.manifest["counts"]
        domains = len(artifact.shards)
        plural = "s" if domains > 1 else ""
        return f"{artifact.rows:,} pairs in {counts['clusters']:,} clusters of {domains:,} domain{plural}"


def _facts(clustering: Clustering, k: int) -> dict[str, Any]:
    return {
        "iterations": clustering.iterations,
        "objective": [float(f"{cost:.{_DIGITS}g}") for cost in clustering.objective],
        "clusters_asked_for": k,
        "refilled": clustering.refilled,
        "pairs_with_zero_vectors": clustering.zeros,
        "sizes": size_histogram(clustering.assignments),  # entry i: clusters of 2^i to 2^(i+1) - 1 pairs
    }
