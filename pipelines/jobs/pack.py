"""`raytriever pack`: pairs to equal batches within one domain, a new packing for every epoch."""

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.clustering.bisection import divide
from pipelines.clustering.clusters import CLUSTERS, DomainPairs, read_domain
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.jobs.lookups import (
    earlier_file,
    earlier_record,
    map_array,
    pair_row_shards,
    pair_rows,
    write_pair_rows,
)
from pipelines.packing.domain_groups import groups_of, unclustered
from pipelines.packing.pack import PackingSettings, number_of_regions, pack, packing_facts
from pipelines.packing.polish import VectorsOf
from pipelines.pairs.pairs import PAIRS, SmallDomains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, did_you_mean
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.vectors import StoredVectors

PACKING = "packing"
SCHEMA = pa.schema([("pair", pa.int64()), ("cluster", pa.int32()), ("domain", pa.string())])
_REGIONS = ("pairs", "clusters", "regions", "bounds")  # arrays of a divided domain: the first two by region
_ROW_GROUP = 1 << 17


class PackConfig(StageConfig):
    """How pairs become batches. Without ``clusters`` they are random ones of ``pairs``."""

    clusters: InputPath | None = None
    """The clusters to pack; None: random batches."""
    pairs: InputPath | None = None
    """The pairs; the swap polish and random batches need them."""
    vectors: InputPath | None = None
    """Vectors of the pairs' collection, for the swap polish."""
    packing: PackingSettings
    """Size and order of batches."""
    small_domains: SmallDomains = "refuse"
    """Without ``clusters``: what becomes of domains with fewer pairs than a batch."""
    epochs: int = Field(default=1, gt=0)
    """Epochs to pack, each anew."""
    seed: int = Field(default=0, ge=0)
    """Of the order, and of what each epoch leaves out."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        packing, small = self.packing, self.small_domains
        if packing.polish_sweeps and not (self.vectors and self.pairs):
            raise ValueError("packing.polish_sweeps needs 'pairs' and 'vectors'. Name both artifacts, or set it to 0")
        if not self.clusters and not self.pairs:
            raise ValueError("there is nothing to pack: name 'clusters', or 'pairs' alone for random batches")
        if not self.clusters and packing.order != "random":
            raise ValueError(
                f"packing.order is {packing.order}, which orders clusters, but no 'clusters' are named. Name them, or"
                " set packing.order to random"
            )
        if small != "refuse" and self.clusters:
            raise ValueError(
                f"small_domains is {small}, which is for random batches: of clusters it was decided when the pairs were"
                " clustered ('cluster' has it too). Leave it out"
            )
        return self


class Pack(Stage[PackConfig]):
    """A shard is an epoch. Of many pairs, an epoch is packed in parts, a file each: a few domains, or one region of a
    large domain, whose regions are found first."""

    command = "pack"
    kind = PACKING
    algorithm_version = 7
    config_class = PackConfig
    unit = "examples"

    def check_inputs(self, there: Set[str]) -> None:
        """Clusters of another kind than the order needs."""
        if "clusters" in there:
            _check_clusters(Artifact(str(self.config.clusters), CLUSTERS), self.config)

    def plan(self) -> list[Shard]:
        """The regions, the pairs' rows, the parts, the epochs; refuses inputs that don't go together."""
        config = self.config
        regions, parts = list[Shard](), list[dict[str, Any]]()
        if config.clusters:
            clusters = Artifact(config.clusters, CLUSTERS)
            most = config.packing.region_pairs
            counts = [number_of_regions(shard.rows, int(shard.counts["clusters"]), most) for shard in clusters.shards]
            parts = parts_of([shard.rows for shard in clusters.shards], counts, most)
            large = {number: count for number, count in enumerate(counts) if count > 1}
            regions = [
                Shard(_regions_shard(number), {"divide": number, "regions": count}, intermediate=True)
                for number, count in large.items()
            ]
            self._check_domains([str(shard.facts["domain"]) for shard in clusters.shards])
        if config.pairs:
            self._check_pairs(Artifact(config.pairs, PAIRS))
        rows = pair_row_shards(Artifact(str(config.pairs), PAIRS)) if config.packing.polish_sweeps else []
        return [*regions, *rows, *self._epochs(parts, len(rows))]

    def _epochs(self, parts: list[dict[str, Any]], rows: int) -> list[Shard]:
        """An epoch is one shard, or, where there is more than one part, the parts and what joins them."""
        shards = []
        for epoch in range(self.config.epochs):
            name = f"epoch={epoch:05d}"
            described = {"epoch": epoch, "rows": rows}
            if len(parts) < 2:
                shards.append(Shard(name, described, phase=1))
                continue
            names = [f"{name}-part-{number:05d}" for number in range(len(parts))]
            for part, of_part in zip(names, parts, strict=True):
                shards.append(Shard(part, described | of_part, phase=1, intermediate=True))
            shards.append(Shard(name, {"epoch": epoch, "parts": names}, phase=2))
        return shards

    def _check_pairs(self, pairs: Artifact) -> None:
        config = self.config
        if config.clusters:
            require_same_origin("pairs", Artifact(config.clusters, CLUSTERS), pairs)
        else:
            self._check_domains(groups_of(pairs, config.packing.batch_size, config.small_domains).names)
        if config.vectors:
            require_same_origin("collection", pairs, StoredVectors(config.vectors))

    def _check_domains(self, names: Sequence[str]) -> None:
        for name in self.config.packing.shuffled_of_domains:
            if name not in names:
                raise UserError(
                    f"packing.shuffled_of_domains names {name!r}, which is no domain.{did_you_mean(name, names)}"
                )

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        if "divide" in shard.description:
            return self._make_regions(shard.description["divide"], shard.description["regions"], writer)
        if "make" in shard.description:
            return write_pair_rows(writer, shard, Artifact(str(self.config.pairs), PAIRS))
        if "domains" in shard.description:
            return self._make_part(shard, writer)
        return self._make_epoch(shard, writer)

    def _make_regions(self, number: int, count: int, writer: ShardWriter) -> ShardRecord:
        """Which region each cluster is in, and a domain's pairs, region after region.

        Regions are of near clusters where a tour is to visit them, else of any.
        """
        domain = read_domain(Artifact(str(self.config.clusters), CLUSTERS), number)
        sizes = np.bincount(domain.clusters, minlength=len(domain.centroids))
        if self.config.packing.order == "tour":
            regions = divide(domain.centroids, sizes, count)
        else:
            regions = (np.random.default_rng([self.config.seed, number]).permutation(len(sizes)) % count).astype(
                np.int32
            )
        of_pairs = regions[domain.clusters]
        by_region = np.argsort(of_pairs, kind="stable")
        bounds = np.cumsum([0, *np.bincount(of_pairs, minlength=count)])
        arrays: list[NDArray[Any]] = [domain.pairs[by_region], domain.clusters[by_region], regions, bounds]
        for name, array in zip(_REGIONS, arrays, strict=True):
            writer.add_array(_regions_file(number, name), array)
        return writer.commit(0)

    def _make_part(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Some domains of one epoch, or a region of one; beside it pairs to be dealt with those of other regions."""
        names = [f"{shard.name.replace('-', '/', 1)}.parquet", f"aside/{shard.name}.parquet"]
        with _writer(writer.path(names[0])) as file, _writer(writer.path(names[1])) as aside:
            figures, left_out = self._pack(shard, file, aside)
        rows = pq.read_metadata(writer.path(names[0])).num_rows
        for name in names:
            writer.add(name)
        facts = {"figures": figures, "left_out": left_out, "domain": shard.description["domains"][0], "rows": rows}
        return writer.commit(0, facts=facts)

    def _make_epoch(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One epoch, domain by domain; a row is an example, ``batch_size`` rows after one another a batch.

        Its files are those of its parts, then what regions have set aside, dealt domain by domain.
        """
        config, epoch, parts = self.config, shard.description["epoch"], shard.description.get("parts")
        size = config.packing.batch_size
        records = [earlier_record(config.output, part) for part in parts or ()]
        writer.adopt([record.files[0] for record in records])
        name = f"{shard.name}/packing.parquet"
        with _writer(writer.path(name)) as file:
            if parts:
                self._deal(epoch, records, file)
                figures = [domain for record in records for domain in record.facts["figures"]]
                left_out = sum(record.facts["left_out"] for record in records)
            else:
                figures, left_out = self._pack(shard, file)
        own = pq.read_metadata(writer.path(name)).num_rows
        if own or not parts:
            writer.add(name)
        rows = own + sum(record.facts["rows"] for record in records)
        return writer.commit(
            rows,
            counts={"batches": rows // size},
            dropped=self._dropped(left_out),
            facts={
                "epoch": epoch,
                "batch_size": size,
                "origins": {"pairs": origin(Artifact(str(config.clusters or config.pairs)), PAIRS)},
                **packing_facts(figures, size),
            },
        )

    def _deal(self, epoch: int, parts: list[ShardRecord], file: pq.ParquetWriter) -> None:
        """Deals what regions have set aside, domain by domain."""
        aside: dict[int, list[Path]] = {}
        for part in parts:
            path = earlier_file(self.config.output, part.name, part.files[1].name)
            if pq.read_metadata(path).num_rows:
                aside.setdefault(part.facts["domain"], []).append(path)
        for number, paths in aside.items():
            rows = pa.concat_tables(pq.read_table(path) for path in paths)
            name = str(Artifact(str(self.config.clusters), CLUSTERS).shards[number].facts["domain"])
            pairs, clusters = (rows[column].to_numpy() for column in ("pair", "cluster"))
            order = np.random.default_rng([self.config.seed, epoch, number]).permutation(len(rows))
            _write(file, DomainPairs(name, pairs, clusters, np.empty((0, 0), dtype=np.float32)), order)

    def _pack(
        self, shard: Shard, file: pq.ParquetWriter, aside: pq.ParquetWriter | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Packs the shard's domains, all, some or a region of one: figures of each, and how many pairs are left out."""
        config, described = self.config, shard.description
        region = described.get("region")
        figures: list[dict[str, Any]] = []
        left_out = 0
        for number, domain in self._domains(described.get("domains"), region):
            packed = pack(
                domain.clusters
                if region is None
                else np.unique(domain.clusters, return_inverse=True)[1].astype(np.int32),
                domain.centroids,
                config.packing,
                config.seed,
                described["epoch"],
                number,
                vectors=self._vectors(domain, described["rows"]) if config.packing.polish_sweeps else None,
                name=domain.domain,
                region=region,
            )
            _write(file, domain, packed.batches.ravel())
            if aside:
                _write(aside, domain, packed.aside)
            figures.append(packed.figures)
            left_out += len(domain.pairs) - packed.batches.size - len(packed.aside)
        return figures, left_out

    def _domains(self, bounds: list[int] | None, region: int | None) -> Iterator[tuple[int, DomainPairs]]:
        """With their numbers, one after another: only one is held."""
        config = self.config
        if not config.clusters:
            pairs = Artifact(str(config.pairs), PAIRS)
            return enumerate(unclustered(groups_of(pairs, config.packing.batch_size, config.small_domains)))
        clusters = Artifact(config.clusters, CLUSTERS)
        chosen = range(*bounds) if bounds else range(len(clusters.shards))
        if region is not None:
            return iter([(chosen[0], self._region(clusters, chosen[0], region))])
        return ((number, read_domain(clusters, number)) for number in chosen)

    def _region(self, clusters: Artifact, number: int, region: int) -> DomainPairs:
        """What ``_make_regions`` wrote, of one region; the centroids are those of its clusters, in order."""
        files = (_regions_file(number, name) for name in _REGIONS)
        found = (map_array(self.config.output, _regions_shard(number), name) for name in files)
        pairs, of_pairs, regions, bounds = found
        own = slice(bounds[region], bounds[region + 1])
        centroids = np.load(clusters.path(clusters.shards[number].files[1].name), mmap_mode="r")
        name = str(clusters.shards[number].facts["domain"])
        return DomainPairs(name, pairs[own], of_pairs[own], centroids[np.flatnonzero(regions == region)])

    def _vectors(self, domain: DomainPairs, parts: int) -> VectorsOf:
        """Reads the vectors of the domain's items by number, those of a few at a time."""
        query_rows, document_rows = pair_rows(self.config.output, parts, domain.pairs)
        vectors = StoredVectors(str(self.config.vectors))
        return StoredPairs(vectors, query_rows=query_rows, document_rows=document_rows).take

    def _dropped(self, left_out: int) -> dict[str, int]:
        dropped = {"pairs that fill no batch of their domain in an epoch": left_out} if left_out else {}
        if self.config.clusters is None:
            pairs = Artifact(str(self.config.pairs), PAIRS)
            groups = groups_of(pairs, self.config.packing.batch_size, self.config.small_domains)
            if groups.dropped:
                dropped["pairs of small domains"] = groups.dropped
        return dropped

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which pairs the numbers mean, and what became of small domains."""
        decided = Artifact(self.config.clusters, CLUSTERS).config if self.config.clusters else self.resolved()
        return {"origins": records[0].facts["origins"], "small_domains": decided["small_domains"]}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        size = artifact.config["packing"]["batch_size"]
        return f"{batches} of {size} in {counted(artifact.config['epochs'], 'epoch')}"


def _writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, SCHEMA, compression="zstd")


def _write(file: pq.ParquetWriter, domain: DomainPairs, items: NDArray[np.int64]) -> None:
    for start in range(0, len(items), _ROW_GROUP):
        chosen = items[start : start + _ROW_GROUP]
        columns = {"pair": domain.pairs[chosen], "cluster": domain.clusters[chosen]}
        file.write_table(pa.table(columns | {"domain": pa.repeat(domain.domain, len(chosen))}, schema=SCHEMA))


def _regions_shard(number: int) -> str:
    return f"regions-{number:05d}"


def _regions_file(number: int, name: str) -> str:
    return f"regions/{number:05d}.{name}.npy"


def _check_clusters(clusters: Artifact, config: PackConfig) -> None:
    sides = clusters.manifest["facts"].get("sides", "both")
    if config.packing.order == "topics" and sides != "queries":
        raise UserError(
            f"packing.order topics draws every batch from one cluster of queries, but {clusters.uri} clusters pairs."
            " Cluster with kmeans.sides queries, or set packing.order to tour or random."
        )


def parts_of(pairs: Sequence[int], regions: Sequence[int], most: int) -> list[dict[str, Any]]:
    """What the tasks of an epoch pack, in the order of the domains: ``domains``, the first and the one behind the last,
    of ``most`` pairs or little more; or of a domain of several regions one ``region``."""
    parts: list[dict[str, Any]] = []
    first, waiting = 0, 0
    for number, (size, count) in enumerate(zip(pairs, regions, strict=True)):
        waiting += size
        if count > 1 and first < number:
            parts.append({"domains": [first, number]})
            first = number
        if count > 1:
            parts += [{"domains": [number, number + 1], "region": region} for region in range(count)]
        elif waiting >= most or number + 1 == len(pairs):
            parts.append({"domains": [first, number + 1]})
        else:
            continue
        first, waiting = number + 1, 0
    return parts
