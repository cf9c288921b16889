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
from raytriever.pipelines.domains import SmallDomains
from raytriever.pipelines.jobs.lookups import add_array, map_array
from raytriever.pipelines.packing.domains import groups_of
from raytriever.pipelines.pairs import PAIRS, read_pairs
from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.plain_text import counted
from raytriever.retrieval.progress import ProgressLine
from raytriever.retrieval.vectors import StoredVectors

LARGE_DOMAIN = 1 << 19  # pairs; a domain of more is clustered by all workers together
_LOOKUP = "lookup"
_ARRAYS = {name: f"lookup/{name}.npy" for name in ("pairs", "query_rows", "document_rows")}
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
        limit = "smallest_domain and the batch size"
        groups = groups_of(artifact, self.config.smallest_domain, self.config.small_domains, limit)
        return groups.labels, groups.names

    def plan(self) -> list[Shard]:
        """Whose pairs are where, then one shard a domain; refuses small domains unless told what to do with them."""
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
        starts = np.cumsum(sizes) - sizes
        domains = [
            Shard(
                f"{number:05d}",
                {
                    "number": number,
                    "name": name,
                    "first": int(starts[number]),
                    "pairs": int(sizes[number]),
                    "left_out": left_out if number == 0 else 0,
                },
                phase=1,
            )
            for number, name in enumerate(names)
        ]
        return [Shard(_LOOKUP, {"pairs": 0}, intermediate=True), *domains]

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
        """One of the shards that ``plan`` lists."""
        return self._make_lookup(writer) if shard.name == _LOOKUP else self._make_domain(shard, writer)

    def _make_lookup(self, writer: ShardWriter) -> ShardRecord:
        """The pairs of all domains, one domain after the other, and their rows: each domain reads its own."""
        labels, _ = self._labels()
        rows = read_pairs(Artifact(self.config.pairs, PAIRS), ["query_row", "document_row"])
        pairs = np.argsort(labels, kind="stable")[int((labels < 0).sum()) :]
        add_array(writer, _ARRAYS["pairs"], pairs)
        add_array(writer, _ARRAYS["query_rows"], rows["query_row"].to_numpy()[pairs])
        add_array(writer, _ARRAYS["document_rows"], rows["document_row"].to_numpy()[pairs])
        return writer.commit(0)

    def _of_domain(self, shard: Shard, array: str) -> NDArray[np.int64]:
        """What ``_make_lookup`` wrote, of one domain, in the order of its pairs."""
        first, count = shard.description["first"], shard.description["pairs"]
        return np.array(map_array(self.config.output, _LOOKUP, _ARRAYS[array])[first : first + count])

    def _make_domain(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Clusters one domain's pairs; writes assignments and centroids."""
        number, name = shard.description["number"], shard.description["name"]
        pairs = self._of_domain(shard, "pairs")
        k = number_of_clusters(len(pairs), self.config.cluster_size)
        seed = self.config.seed ^ zlib.crc32(name.encode("utf-8", "surrogatepass"))  # of the domain, wherever it stands
        clustering = cluster_in_parts(
            self._stored(shard, pairs), k, self.config.kmeans, seed, split=self._split, device=self._device
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

    def _stored(self, shard: Shard, pairs: NDArray[np.int64]) -> StoredPairs:
        artifact = Artifact(self.config.pairs, PAIRS)

        def name(place: int) -> str:
            ids = read_pairs(artifact, ["query_id", "document_id"]).slice(int(pairs[place]), 1).to_pylist()[0]
            return f"pair {pairs[place]} (query {ids['query_id']!r}, document {ids['document_id']!r})"

        return StoredPairs(
            StoredVectors(self.config.vectors),
            self._of_domain(shard, "document_rows"),
            self._of_domain(shard, "query_rows"),
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
        clusters = counted(artifact.manifest["counts"]["clusters"], "cluster")
        return f"{counted(artifact.rows, 'pair')} in {clusters} of {counted(len(artifact.shards), 'domain')}"


def _facts(clustering: Clustering, k: int) -> dict[str, Any]:
    return {
        "iterations": clustering.iterations,
        "objective": [float(f"{cost:.{_DIGITS}g}") for cost in clustering.objective],
        "clusters_asked_for": k,
        "refilled": clustering.refilled,
        "pairs_with_zero_vectors": clustering.zeros,
        "sizes": size_histogram(clustering.assignments),  # entry i: clusters of 2^i to 2^(i+1) - 1 pairs
    }
