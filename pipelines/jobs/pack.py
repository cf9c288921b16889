"""`raytriever pack`: pairs to equal batches within one domain, a new packing for every epoch."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.clustering.bisection import divide
from pipelines.clustering.clusters import CLUSTERS, DomainPairs, read_domain
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.jobs.lookups import (
    add_stretches,
    domain_shards,
    earlier_record,
    map_array,
    pair_row_shards,
    pair_rows,
    read_stretch,
    write_by_domain,
    write_pair_rows,
)
from pipelines.packing.domain_groups import DomainGroups, groups_of, unclustered, unclustered_domain
from pipelines.packing.pack import PackingSettings, cut_into_batches, number_of_regions, pack, packing_facts
from pipelines.pairs.pairs import PAIRS, SmallDomains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, did_you_mean
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Shard, Stage, StageConfig, shard_name
from retrieval.vectors import StoredVectors

if TYPE_CHECKING:
    from pipelines.packing.polish import VectorsOf

PACKING = "packing"
SCHEMA = pa.schema([("pair", pa.int64()), ("cluster", pa.int32()), ("domain", pa.string())])
_OF_CLUSTERS = "lookup/{}.clusters.npy"  # of a divided domain: the region of each cluster
_DRAWN = "drawn"  # pairs without clusters, by domain
_ROW_GROUP = 1 << 17
_SHARE = 2  # in a seed: of the pairs that regions have set aside


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
    large domain, whose regions are found first. What these set aside is dealt anew, in as many shares."""

    command = "pack"
    kind = PACKING
    algorithm_version = 8
    config_class = PackConfig
    unit = "examples"

    def check_inputs(self, there: Set[str]) -> None:
        """Clusters of another kind than the order needs."""
        if "clusters" in there:
            _check_clusters(Artifact(str(self.config.clusters), CLUSTERS), self.config)

    def cost(self, read: Size) -> Cost:
        """A region of an epoch is a task, and so is what all of them set aside; random batches are shuffled."""
        rows, epochs, most = self.config.packing.batch_size, self.config.epochs, self.config.packing.region_pairs
        made = replace(read, rows=rows, batches=read.pairs // rows, epochs=epochs, disk=20 * epochs * read.pairs)
        each = 29e-6 if self.config.clusters else 0.44e-6
        return Cost(made, each * epochs * read.pairs, epochs * ceil(read.pairs / most))

    def plan(self) -> list[Shard]:
        """The regions, the pairs' rows, the parts, the epochs; refuses inputs that don't go together."""
        config, most, of_small = self.config, self.config.packing.region_pairs, 0
        if config.pairs:
            self._check_pairs(Artifact(config.pairs, PAIRS))
        if config.clusters:
            shards = Artifact(config.clusters, CLUSTERS).shards
            names, sizes = [str(shard.facts["domain"]) for shard in shards], [shard.rows for shard in shards]
            counts = [number_of_regions(shard.rows, int(shard.counts["clusters"]), most) for shard in shards]
            regions = [
                Shard(_regions_shard(number), {"divide": number, "regions": count}, intermediate=True)
                for number, count in enumerate(counts)
                if count > 1
            ]
        else:
            groups = self._groups()
            names, sizes, of_small = list(groups.names), groups.sizes, groups.dropped
            counts = [ceil(size / most) for size in sizes]
            regions = domain_shards(_DRAWN, Artifact(str(config.pairs), PAIRS), groups, seed=config.seed)
        for name in config.packing.shuffled_of_domains:
            if name not in names:
                raise UserError(
                    f"packing.shuffled_of_domains names {name!r}, which is no domain.{did_you_mean(name, names)}"
                )
        rows = pair_row_shards(Artifact(str(config.pairs), PAIRS)) if config.packing.polish_sweeps else []
        parts = [
            part | {"names": names[slice(*part["domains"])], "of": counts[part["domains"][0]]}
            for part in parts_of(sizes, counts, most)
        ]
        described = {"rows": len(rows), "drawn": 0 if config.clusters else len(regions), "of_small": of_small}
        return [*(regions if len(parts) > 1 else ()), *rows, *self._epochs(parts, described)]

    def _epochs(self, parts: list[dict[str, Any]], described: dict[str, Any]) -> list[Shard]:
        """An epoch is one shard, or, where there is more than one part, the parts, the shares and what joins them."""
        shards = []
        for epoch in range(self.config.epochs):
            name = f"epoch={epoch:05d}"
            of_epoch = described | {"epoch": epoch}
            if len(parts) < 2:
                shards.append(Shard(name, of_epoch, phase=1))
                continue
            names = [f"{name}-part-{number:05d}" for number in range(len(parts))]
            packed = [
                Shard(at, of_epoch | part, phase=1, intermediate=True) for at, part in zip(names, parts, strict=True)
            ]
            dealt = []
            for number, part in enumerate(parts):
                if "region" in part and self.config.packing.shuffled_share(epoch, part["names"][0]):
                    first = number - part["region"]
                    share = {"epoch": epoch, "share": part, "parts": names[first : first + part["of"]]}
                    dealt.append(Shard(f"{name}-dealt-{number:05d}", share, phase=2, intermediate=True))
            joined = [shard.name for shard in (*packed, *dealt)]
            shards += [*packed, *dealt, Shard(name, of_epoch | {"parts": joined}, phase=3)]
        return shards

    def _groups(self) -> DomainGroups:
        config = self.config
        return groups_of(Artifact(str(config.pairs), PAIRS), config.packing.batch_size, config.small_domains)

    def _check_pairs(self, pairs: Artifact) -> None:
        if self.config.clusters:
            require_same_origin("pairs", Artifact(self.config.clusters, CLUSTERS), pairs)
        if self.config.vectors:
            require_same_origin("collection", pairs, StoredVectors(self.config.vectors))

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        if "divide" in shard.description:
            return self._make_regions(shard, writer)
        if "make" in shard.description:
            write = write_by_domain if shard.description["make"] == _DRAWN else write_pair_rows
            return write(writer, shard, Artifact(str(self.config.pairs), PAIRS))
        if "share" in shard.description:
            return self._make_share(shard, writer)
        return self._make_part(shard, writer) if "domains" in shard.description else self._make_epoch(shard, writer)

    def _make_regions(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Which region each cluster is in, and a domain's pairs with their clusters, region after region.

        Regions are of near clusters where a tour is to visit them, else of any.
        """
        number, count = shard.description["divide"], shard.description["regions"]
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
        add_stretches(writer, shard, [domain.pairs[by_region], domain.clusters[by_region]], bounds)
        writer.add_array(_OF_CLUSTERS.format(shard.name), regions)
        return writer.commit(0)

    def _make_part(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Some domains of one epoch, or a region of one; beside it pairs to be dealt with those of other regions."""
        described = shard.description
        with _writer(writer, shard) as file:
            facts, aside = self._pack(shard, file)
        if "region" in described and self.config.packing.shuffled_share(described["epoch"], described["names"][0]):
            add_stretches(writer, shard, aside, [0, len(aside[0])])
        return writer.commit(0, facts=facts)

    def _make_share(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """As many of the pairs that each region of a domain has set aside, dealt anew."""
        described, share, size = shard.description, shard.description["share"], self.config.packing.batch_size
        pairs, clusters = read_stretch(self.config.output, described["parts"], 0, share["region"], share["of"])
        domain = DomainPairs(share["names"][0], pairs, clusters.astype(np.int32), np.empty((0, 0), dtype=np.float32))
        place = [share["domains"][0], share["region"], _SHARE]
        order = np.random.default_rng([self.config.seed, described["epoch"], *place]).permutation(len(pairs))
        batches = cut_into_batches(order, size)
        with _writer(writer, shard) as file:
            _write(file, domain, batches.ravel())
        figures = [{"shuffled": len(batches)}]
        return writer.commit(0, facts=_facts(figures, len(pairs) - batches.size, batches.size))

    def _make_epoch(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One epoch, domain by domain; a row is an example, ``batch_size`` rows after one another a batch.

        Its files are those of its parts, then of the shares of what regions have set aside.
        """
        config, epoch, parts = self.config, shard.description["epoch"], shard.description.get("parts")
        size = config.packing.batch_size
        if parts:
            records = [earlier_record(config.output, part) for part in parts]
            writer.adopt([record.files[0] for record in records if record.facts["rows"]])
            found = [record.facts for record in records]
        else:
            with _writer(writer, shard) as file:
                found = [self._pack(shard, file)[0]]
        figures = [domain for facts in found for domain in facts["figures"]]
        left_out, rows = (sum(facts[name] for facts in found) for name in ("left_out", "rows"))
        dropped = {"pairs that fill no batch of their domain in an epoch": left_out}
        dropped["pairs of small domains"] = shard.description["of_small"]
        return writer.commit(
            rows,
            counts={"batches": rows // size},
            dropped={reason: count for reason, count in dropped.items() if count},
            facts={
                "epoch": epoch,
                "batch_size": size,
                "origins": {"pairs": origin(Artifact(str(config.clusters or config.pairs)), PAIRS)},
                **packing_facts(figures, size),
            },
        )

    def _pack(self, shard: Shard, file: pq.ParquetWriter) -> tuple[dict[str, Any], list[NDArray[np.integer]]]:
        """Packs the shard's domains, all, some or a region of one: what came of it, and what is set aside."""
        config, described = self.config, shard.description
        region = described.get("region")
        figures: list[dict[str, Any]] = []
        left_out = rows = 0
        aside: list[NDArray[np.integer]] = []
        for number, domain in self._domains(described):
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
            aside = [domain.pairs[packed.aside], domain.clusters[packed.aside]]
            figures.append(packed.figures)
            rows += packed.batches.size
            left_out += len(domain.pairs) - packed.batches.size - len(packed.aside)
        return _facts(figures, left_out, rows), aside

    def _domains(self, described: dict[str, Any]) -> Iterator[tuple[int, DomainPairs]]:
        """With their numbers, one after another: only one is held."""
        config, region = self.config, described.get("region")
        if not config.clusters:
            if "domains" not in described:
                return enumerate(unclustered(self._groups()))
            return ((number, self._drawn(number, described)) for number in range(*described["domains"]))
        clusters = Artifact(config.clusters, CLUSTERS)
        chosen = range(*described.get("domains", [len(clusters.shards)]))
        if region is not None:
            return iter([(chosen[0], self._region(clusters, chosen[0], region))])
        return ((number, read_domain(clusters, number)) for number in chosen)

    def _drawn(self, number: int, described: dict[str, Any]) -> DomainPairs:
        """A domain without clusters, or as many pairs of it as a region has, drawn from all."""
        parts = [shard_name(_DRAWN, part) for part in range(described["drawn"])]
        (pairs,) = read_stretch(self.config.output, parts, number, described.get("region", 0), described["of"])
        return unclustered_domain(described["names"][number - described["domains"][0]], np.sort(pairs))

    def _region(self, clusters: Artifact, number: int, region: int) -> DomainPairs:
        """What ``_make_regions`` wrote, of one region; the centroids are those of its clusters, in order."""
        shard = _regions_shard(number)
        pairs, of_pairs = read_stretch(self.config.output, [shard], region)
        regions = map_array(self.config.output, shard, _OF_CLUSTERS.format(shard))
        centroids = np.load(clusters.path(clusters.shards[number].files[1].name), mmap_mode="r")
        name = str(clusters.shards[number].facts["domain"])
        own = centroids[np.flatnonzero(regions == region)]
        return DomainPairs(name, pairs, of_pairs.astype(np.int32), own)

    def _vectors(self, domain: DomainPairs, parts: int) -> "VectorsOf":
        """Reads the vectors of the domain's items by number, those of a few at a time."""
        query_rows, document_rows = pair_rows(self.config.output, parts, domain.pairs)
        vectors = StoredVectors(str(self.config.vectors))
        return StoredPairs(vectors, query_rows=query_rows, document_rows=document_rows).take

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which pairs the numbers mean, and what became of small domains."""
        decided = Artifact(self.config.clusters, CLUSTERS).config if self.config.clusters else self.resolved()
        return {"origins": records[0].facts["origins"], "small_domains": decided["small_domains"]}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        size = artifact.config["packing"]["batch_size"]
        return f"{batches} of {size} in {counted(artifact.config['epochs'], 'epoch')}"


@contextmanager
def _writer(writer: ShardWriter, shard: Shard) -> Iterator[pq.ParquetWriter]:
    """Of the shard's packed pairs: a file of its epoch."""
    epoch, _, part = shard.name.partition("-")
    name = f"{epoch}/{part or 'packing'}.parquet"
    with pq.ParquetWriter(writer.path(name), SCHEMA, compression="zstd") as file:
        yield file
    writer.add(name)


def _facts(figures: list[dict[str, Any]], left_out: int, rows: int) -> dict[str, Any]:
    """Of a part of an epoch."""
    return {"figures": figures, "left_out": left_out, "rows": rows}


def _write(file: pq.ParquetWriter, domain: DomainPairs, items: NDArray[np.int64]) -> None:
    for start in range(0, len(items), _ROW_GROUP):
        chosen = items[start : start + _ROW_GROUP]
        columns = {"pair": domain.pairs[chosen], "cluster": domain.clusters[chosen]}
        file.write_table(pa.table(columns | {"domain": pa.repeat(domain.domain, len(chosen))}, schema=SCHEMA))


def _regions_shard(number: int) -> str:
    return f"regions-{number:05d}"


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
