"""`raytriever cluster`: asymmetric k-means over pairs, within each domain."""

import zlib
from collections.abc import Iterator, Set
from dataclasses import replace
from math import isqrt, sqrt
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeInt, PositiveInt

from pipelines.clustering.kmeans import CLUSTERS, KMeansSettings, cluster_pairs, number_of_clusters
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.clustering.points import LocalParts, Split
from pipelines.jobs.lookups import earlier_file
from pipelines.pairs.pairs import PAIRS, DomainGroups, SmallDomains, groups_of, read_pairs
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.relations import numbered_rows, open_relations
from raytriever.reports.progress import ProgressLine
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import WHOLE, Phase, Shard, Stage, StageConfig
from retrieval.vectors import StoredVectors

LARGE_DOMAIN = 1 << 19  # pairs; a domain of more is clustered by all workers together
WORKERS_OF_A_DOMAIN = 32  # one large domain at a time is clustered for each so many workers,
MOST_AT_ONCE = 8  # and no more than these, because their sums are in the driver's memory
_BY_DOMAIN = "by_domain"  # a phase,
_ORDERED = "relations/by_domain.parquet"  # and what it makes
_DIGITS = 9  # of recorded costs: what rounding leaves open is not recorded


class ClusterConfig(StageConfig):
    """How pairs are clustered. ``cluster_size`` is the average: K = ceil(pairs / cluster_size) in each domain."""

    pairs: InputPath
    """The pairs to cluster."""
    vectors: InputPath
    """Vectors of the queries and documents of their collection."""
    cluster_size: PositiveInt = 64
    """Mean number of pairs in a cluster."""
    smallest_domain: PositiveInt = 64
    """Domains with fewer pairs are small. Use the batch size, because a domain must fill a batch."""
    small_domains: SmallDomains = "refuse"
    """What to do with small domains. refuse: stop. merge: cluster and batch them together. merge_all: treat all domains
    as one. drop: leave their pairs out."""
    kmeans: KMeansSettings = KMeansSettings()
    """Settings of the clustering."""
    seed: NonNegativeInt = 0
    """Seed of the first centroids."""


GROUPED = """
    CREATE TABLE grouped AS SELECT number, row AS pair, query_row, document_row FROM stream JOIN groups USING (domain)
"""
BY_DOMAIN = "FROM grouped ORDER BY number, pair"


class Domain(NamedTuple):
    """Pairs that are clustered together; ``left_out``: those in no domain, with the first one."""

    number: int
    name: str
    pairs: int
    left_out: int


class Cluster(Stage[ClusterConfig]):
    """A domain (or the small domains merged) is a task, but large ones are shared by all workers."""

    command = "cluster"
    kind = CLUSTERS
    algorithm_version = 4
    config_class = ClusterConfig
    unit = "pairs"

    def _groups(self) -> DomainGroups:
        artifact = Artifact(self.config.pairs, PAIRS)
        if not artifact.rows:
            raise UserError(f"{artifact.uri} holds no pairs, so there is nothing to cluster.")
        limit = "smallest_domain and the batch size"
        return groups_of(artifact, self.config.smallest_domain, self.config.small_domains, limit)

    def check_inputs(self, there: Set[str]) -> None:
        """Too few pairs for a domain."""
        if "pairs" in there:
            self._groups()

    def cost(self, read: Size) -> Cost:
        """N·√K in a domain of many clusters, N·K in one of few. A small domain is a task, and a cell of a large one."""
        work, tasks = 0.0, 0
        for pairs in filter(None, read.domains):
            clusters = number_of_clusters(pairs, self.config.cluster_size)
            few = clusters <= self.config.kmeans.two_level_above
            work += pairs * (70e-9 * clusters if few else 153e-6 * sqrt(pairs / 10_000_000))
            tasks += isqrt(clusters) if pairs > LARGE_DOMAIN else 1
        return Cost(replace(read, disk=20 * read.pairs), work, tasks)

    def phases(self) -> list[Phase]:
        """The pairs domain after domain, then each domain; refuses small ones unless told what to do with them."""
        vectors = StoredVectors(self.config.vectors)
        require_same_origin("collection", Artifact(self.config.pairs, PAIRS), vectors)
        for part in ("queries", "documents") if self.config.kmeans.sides == "both" else ("queries",):
            vectors.part(part).require_one()
        groups = self._groups()
        domains = [
            Domain(number, name, size, groups.dropped if number == 0 else 0)
            for number, (name, size) in enumerate(zip(groups.names, groups.sizes, strict=True))
        ]
        return [
            Phase(_BY_DOMAIN, WHOLE, self._order_by_domain),
            Phase("", domains, self._make_domain, intermediate=False),
        ]

    def total_rows(self) -> int:
        """Pairs of all domains."""
        return sum(domain.pairs for domain in self._phases[""].tasks)

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Small domains side by side, each on a worker, then large ones, the largest first, each on all workers."""
        spread = not self.is_made_here(pending, session)
        domains = [shard for shard in pending if isinstance(shard.task, Domain)]
        large = [shard for shard in domains if spread and shard.task.pairs > LARGE_DOMAIN]
        if small := [shard for shard in pending if shard not in large]:
            yield from super().execute(small, session, progress)
        if not large:
            return
        self.start_ray(session)
        from pipelines.jobs.part_workers import PartWorkers

        large.sort(key=lambda shard: int(shard.task.pairs), reverse=True)
        most = min(MOST_AT_ONCE, len(large))
        with PartWorkers(self.config.resources, WORKERS_OF_A_DOMAIN, most) as workers:
            for record in workers.map_domains(self._make_large, large):
                progress.advance(record.rows)
                yield record

    def _make_large(self, shard: Shard, split: Split) -> ShardRecord:
        stage = self.for_workers()
        stage._split = split
        return stage.make_shard(shard)

    _split: Split = LocalParts  # where the parts of a domain are

    def _order_by_domain(self, _: None, writer: ShardWriter) -> ShardRecord:
        """The rows of all pairs that are in a group, group after group."""
        groups = self._groups().table()
        columns = ("domain", "query_row", "document_row")
        with open_relations(self.config, writer.path("spill")) as db:
            db.load("CREATE TABLE groups AS FROM stream", groups.schema, [groups])
            db.load(GROUPED, *numbered_rows(Artifact(self.config.pairs, PAIRS), "pairs/", *columns))
            db.write(BY_DOMAIN, writer.path(_ORDERED))
        writer.add(_ORDERED)
        return writer.commit()

    def _make_domain(self, domain: Domain, writer: ShardWriter) -> ShardRecord:
        """Clusters one domain's pairs; writes assignments and centroids."""
        number, name, _, left_out = domain
        ordered = earlier_file(self.config.output, _BY_DOMAIN, _ORDERED)
        of_domain = pq.read_table(ordered, filters=[("number", "==", number)])
        pairs, query_rows, document_rows = (of_domain[name].to_numpy() for name in of_domain.column_names[1:])
        vectors = StoredVectors(self.config.vectors)
        k = number_of_clusters(len(pairs), self.config.cluster_size)
        seed = self.config.seed ^ zlib.crc32(name.encode("utf-8", "surrogatepass"))  # of the domain, wherever it stands
        clustering = cluster_pairs(
            StoredPairs(vectors, query_rows=query_rows, document_rows=document_rows, sides=self.config.kmeans.sides),
            k,
            self.config.kmeans,
            seed,
            split=self._split,
            device="cuda" if self.config.resources.gpus_per_worker else "cpu",
            name_of=lambda place: self._name(int(pairs[place])),
        )
        base = f"domains/{number:05d}"
        writer.add_table(f"{base}.parquet", pa.table({"pair": pairs, "cluster": clustering.assignments}))
        writer.add_array(f"{base}.centroids.npy", clustering.centroids)
        return writer.commit(
            len(pairs),
            counts={"clusters": len(clustering.centroids)},
            dropped={"pairs of small domains": left_out} if left_out else {},
            facts={
                "domain": name,
                "iterations": len(clustering.objective) - 1,
                "objective": [float(f"{cost:.{_DIGITS}g}") for cost in clustering.objective],
                "clusters_asked_for": k,
                "refilled": clustering.refilled,
                "pairs_with_zero_vectors": clustering.zeros,
            },
        )

    def _name(self, pair: int) -> str:
        ids = read_pairs(Artifact(self.config.pairs, PAIRS), ["query_id", "document_id"]).slice(pair, 1).to_pylist()[0]
        return f"pair {pair} (query {ids['query_id']!r}, document {ids['document_id']!r})"

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The clustered input, and the number of clusters asked for over all domains."""
        summed = ("clusters_asked_for", "refilled", "pairs_with_zero_vectors")
        sums = {name: sum(record.facts[name] for record in records) for name in summed}
        return {"sides": self.config.kmeans.sides, **sums}

    def summary(self, artifact: Artifact) -> str:
        """Pairs, clusters, domains."""
        clusters = counted(artifact.manifest["counts"]["clusters"], "cluster")
        domains, left_out = counted(len(artifact.shards), "domain"), sum(artifact.manifest["dropped"].values())
        beside = f" (left out: {counted(left_out, 'pair')} of small domains)" if left_out else ""
        return f"{counted(artifact.rows, 'pair')} in {clusters} of {domains}{beside}"
