"""`raytriever pack`: pairs to equal batches within one domain, a new packing for every epoch."""

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.clustering.clusters import CLUSTERS, DomainPairs, read_domain
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.jobs.lookups import add_array, earlier_file, earlier_record, map_array, map_pair_rows, write_pair_rows
from pipelines.packing.domain_groups import groups_of, unclustered
from pipelines.packing.neighbours import LISTS, Neighbours, find_neighbours
from pipelines.packing.pack import PackingSettings, pack, packing_facts
from pipelines.packing.polish import VectorsOf
from pipelines.pairs.pairs import PAIRS, SmallDomains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, did_you_mean
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.indexes.vector_index import set_threads
from retrieval.vectors import StoredVectors

PART_PAIRS = 1 << 20  # of a part of an epoch, at least, in all parts but the last
PACKING = "packing"
SCHEMA = pa.schema([("pair", pa.int64()), ("cluster", pa.int32()), ("domain", pa.string())])
_ROW_GROUP = 1 << 17
_ROWS_SHARD = "pair-rows"
_STORED_FROM = 2048  # clusters of a domain; the lists of fewer are made in less time than they are read


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
    """A shard is an epoch. Before them, one for each large domain lists the neighbours that all epochs' tours need; of
    many pairs in several domains, an epoch is packed in parts before it is joined."""

    command = "pack"
    kind = PACKING
    algorithm_version = 3
    config_class = PackConfig
    unit = "examples"

    def check_inputs(self, there: Set[str]) -> None:
        """Clusters of another kind than the order needs."""
        if "clusters" in there:
            _check_clusters(Artifact(str(self.config.clusters), CLUSTERS), self.config)

    def plan(self) -> list[Shard]:
        """The lists, the parts, the epochs; refuses inputs that don't go together."""
        config = self.config
        lists: list[Shard] = []
        bounds: list[tuple[int, int]] = []
        if config.clusters:
            clusters = Artifact(config.clusters, CLUSTERS)
            sizes = [int(shard.counts["clusters"]) for shard in clusters.shards]
            bounds = parts_of([shard.rows for shard in clusters.shards])
            if config.packing.order == "tour":
                large = [number for number, size in enumerate(sizes) if size >= _STORED_FROM]
                lists = [Shard(_lists_shard(number), {"lists": number}, intermediate=True) for number in large]
            self._check_domains([str(shard.facts["domain"]) for shard in clusters.shards])
        if config.pairs:
            self._check_pairs(Artifact(config.pairs, PAIRS))
        rows = [Shard(_ROWS_SHARD, {"rows": "of pairs"}, intermediate=True)] if config.packing.polish_sweeps else []
        return [*lists, *rows, *self._epochs(bounds)]

    def _epochs(self, bounds: list[tuple[int, int]]) -> list[Shard]:
        """An epoch is one shard, or, where there is more than one part, the parts and what joins them."""
        shards = []
        for epoch in range(self.config.epochs):
            name = f"epoch={epoch:05d}"
            if len(bounds) < 2:
                shards.append(Shard(name, {"epoch": epoch}, phase=1))
                continue
            parts = {f"{name}-part-{number:05d}": bound for number, bound in enumerate(bounds)}
            for part, bound in parts.items():
                shards.append(Shard(part, {"epoch": epoch, "domains": list(bound)}, phase=1, intermediate=True))
            shards.append(Shard(name, {"epoch": epoch, "parts": list(parts)}, phase=2))
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
        if "lists" in shard.description:
            return self._make_lists(shard, writer)
        if "rows" in shard.description:
            write_pair_rows(writer, Artifact(str(self.config.pairs), PAIRS))
            return writer.commit(0)
        if "domains" in shard.description:
            return self._make_part(shard, writer)
        return self._make_epoch(shard, writer)

    def _make_lists(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        number = shard.description["lists"]
        assert self.config.clusters is not None
        centroids = read_domain(Artifact(self.config.clusters, CLUSTERS), number).centroids
        if len(centroids) > self.config.packing.exact_neighbours_up_to:
            set_threads(max(1, int(self.config.resources.cpus)))
        neighbours = find_neighbours(centroids, self.config.packing.exact_neighbours_up_to)
        for name in LISTS:
            add_array(writer, _list_file(number, name), getattr(neighbours, name))
        return writer.commit(0)

    def _make_part(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Some domains of one epoch."""
        name = f"parts/{shard.name}.parquet"
        with _writer(writer.path(name)) as file:
            figures, left_out = self._pack(shard.description["epoch"], file, range(*shard.description["domains"]))
        writer.add(name)
        return writer.commit(0, facts={"figures": figures, "left_out": left_out})

    def _make_epoch(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One epoch, domain by domain; a row is an example, ``batch_size`` rows after one another a batch."""
        epoch, size, parts = shard.description["epoch"], self.config.packing.batch_size, shard.description.get("parts")
        name = f"{shard.name}/packing.parquet"
        with _writer(writer.path(name)) as file:
            figures, left_out = self._join(parts, file) if parts else self._pack(epoch, file)
        rows = pq.read_metadata(writer.path(name)).num_rows
        writer.add(name)
        return writer.commit(
            rows,
            counts={"batches": rows // size},
            dropped=self._dropped(left_out),
            facts={
                "epoch": epoch,
                "batch_size": size,
                "origins": {"pairs": self._pairs_fingerprint()},
                **packing_facts(figures, size),
            },
        )

    def _join(self, parts: list[str], file: pq.ParquetWriter) -> tuple[list[dict[str, Any]], int]:
        """Writes the examples of all parts, row group after row group: byte for byte what one task would write."""
        figures: list[dict[str, Any]] = []
        left_out = 0
        for shard in parts:
            record = earlier_record(self.config.output, shard)
            with pq.ParquetFile(earlier_file(self.config.output, shard, record.files[0].name)) as part:
                for group in range(part.num_row_groups):
                    file.write_table(part.read_row_group(group))
            figures += record.facts["figures"]
            left_out += record.facts["left_out"]
        return figures, left_out

    def _pack(
        self, epoch: int, file: pq.ParquetWriter, numbers: range | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Packs the domains of these ``numbers``, or all of them: figures of each, and how many pairs are left out."""
        config = self.config
        read = self._vectors() if config.packing.polish_sweeps else None
        figures: list[dict[str, Any]] = []
        left_out = 0
        for number, domain in enumerate(self._domains(numbers), start=numbers.start if numbers else 0):
            packed = pack(
                domain.clusters,
                domain.centroids,
                config.packing,
                config.seed,
                epoch,
                number,
                vectors=_of_domain(read, domain.pairs) if read else None,
                neighbours=self._stored_neighbours(number, domain),
                name=domain.domain,
            )
            chosen = packed.batches.ravel()
            for start in range(0, len(chosen), _ROW_GROUP):
                file.write_table(_table(domain, chosen[start : start + _ROW_GROUP]))
            figures.append(packed.figures)
            left_out += len(domain.pairs) - packed.batches.size
        return figures, left_out

    def _domains(self, numbers: range | None) -> Iterator[DomainPairs]:
        """One after another: only one is held."""
        config = self.config
        if config.clusters:
            clusters = Artifact(config.clusters, CLUSTERS)
            chosen = range(len(clusters.shards)) if numbers is None else numbers
            return (read_domain(clusters, number) for number in chosen)
        pairs = Artifact(str(config.pairs), PAIRS)
        return unclustered(groups_of(pairs, config.packing.batch_size, config.small_domains))

    def _stored_neighbours(self, number: int, domain: DomainPairs) -> Neighbours | None:
        if self.config.packing.order != "tour" or len(domain.centroids) < _STORED_FROM:
            return None
        shard = _lists_shard(number)
        lists = [map_array(self.config.output, shard, _list_file(number, name)) for name in LISTS]
        exact = len(domain.centroids) <= self.config.packing.exact_neighbours_up_to
        return Neighbours(domain.centroids, exact, *lists)

    def _vectors(self) -> VectorsOf:
        """Reads the vectors of pairs by number, those of a few at a time."""
        assert self.config.vectors is not None
        query_rows, document_rows = map_pair_rows(self.config.output, _ROWS_SHARD)
        return StoredPairs(StoredVectors(self.config.vectors), document_rows, query_rows).take

    def _dropped(self, left_out: int) -> dict[str, int]:
        dropped = {"pairs that fill no batch of their domain in an epoch": left_out} if left_out else {}
        if self.config.clusters is None:
            assert self.config.pairs is not None
            pairs = Artifact(self.config.pairs, PAIRS)
            groups = groups_of(pairs, self.config.packing.batch_size, self.config.small_domains)
            if groups.dropped:
                dropped["pairs of small domains"] = groups.dropped
        return dropped

    def _pairs_fingerprint(self) -> str:
        if self.config.clusters:
            return str(Artifact(self.config.clusters, CLUSTERS).manifest["inputs"]["pairs"])
        assert self.config.pairs is not None
        return Artifact(self.config.pairs, PAIRS).fingerprint

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which pairs the numbers mean, and how the tours' neighbours were found."""
        found: dict[str, Any] = {"origins": records[0].facts["origins"]}
        if self.config.clusters and self.config.packing.order == "tour":
            most = max(int(shard.counts["clusters"]) for shard in Artifact(self.config.clusters, CLUSTERS).shards)
            found["neighbours"] = "exact" if most <= self.config.packing.exact_neighbours_up_to else "hnsw"
        return found

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        size = artifact.config["packing"]["batch_size"]
        return f"{batches} of {size} in {counted(artifact.config['epochs'], 'epoch')}"


def _writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, SCHEMA, compression="zstd")


def _table(domain: DomainPairs, items: NDArray[np.int64]) -> pa.Table:
    columns = {"pair": domain.pairs[items], "cluster": domain.clusters[items]}
    return pa.table(columns | {"domain": pa.repeat(domain.domain, len(items))}, schema=SCHEMA)


def _of_domain(read: VectorsOf, pairs: NDArray[np.int64]) -> VectorsOf:
    return lambda items: read(pairs[items])


def _lists_shard(number: int) -> str:
    return f"neighbours-{number:05d}"


def _list_file(number: int, name: str) -> str:
    return f"neighbours/{number:05d}.{name}.npy"


def _check_clusters(clusters: Artifact, config: PackConfig) -> None:
    sides = clusters.manifest["facts"].get("sides", "both")
    if config.packing.order == "topics" and sides != "queries":
        raise UserError(
            f"packing.order topics draws every batch from one cluster of queries, but {clusters.uri} clusters pairs."
            " Cluster with kmeans.sides queries, or set packing.order to tour or random."
        )


def parts_of(pairs_of_domains: Sequence[int]) -> list[tuple[int, int]]:
    """The domains (first, and the one behind the last) of each part, for all domains in order."""
    bounds, pairs = [0], 0
    for number, size in enumerate(pairs_of_domains, start=1):
        pairs += size
        if pairs >= PART_PAIRS:
            bounds.append(number)
            pairs = 0
    if pairs:
        bounds.append(len(pairs_of_domains))
    return list(pairwise(bounds))
