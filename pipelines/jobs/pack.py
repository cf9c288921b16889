"""`raytriever pack`: pairs to equal batches within one domain, a new packing for every epoch."""

import io
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from pipelines.clustering.kmeans import CLUSTERS, read_centroids, read_domain
from pipelines.clustering.lloyd import divide
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.jobs.lookups import earlier_file, earlier_record, earlier_shards
from pipelines.packing.pack import PackingSettings, number_of_regions, pack, share, whole_batches
from pipelines.pairs.pairs import PAIRS, DomainGroups, SmallDomains, groups_of
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.hashes import numbers_at, string_hashes
from raytriever.relations import numbered_rows, open_relations
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, phases_of_epochs
from retrieval.vectors import StoredVectors

if TYPE_CHECKING:
    from pipelines.packing.polish import VectorsOf

PACKING = "packing"
SCHEMA = pa.schema([("pair", pa.int64()), ("cluster", pa.int32()), ("domain", pa.string())])
_PLACED = pa.schema([("number", pa.int64()), ("region", pa.int64()), ("pair", pa.int64()), ("cluster", pa.int32())])
_PLACE, _ORDERED = "placed", "relations/placed.parquet"  # a phase, and what it makes
_ASIDE = "lookup/epoch={:05d}/{}.npy"  # what the part of a region has set aside: pairs and their clusters
_ROW_GROUP = 1 << 17
_PARTS, _SHARES = "parts-", "shares-"  # phases, by epoch
_ROWS = ("query_row", "document_row")
_SHARE = 2  # in a seed: of the pairs that regions have set aside


class PackConfig(StageConfig):
    """How pairs become batches. Without ``clusters`` they are random ones of ``pairs``."""

    clusters: InputPath | None = None
    """The clusters to pack. null: random batches."""
    pairs: InputPath | None = None
    """The pairs. Swaps and random batches need them."""
    vectors: InputPath | None = None
    """Vectors of the pairs' collection, for swaps."""
    packing: PackingSettings
    """Size and order of batches."""
    small_domains: SmallDomains = "refuse"
    """Without ``clusters``: what to do with domains that have fewer pairs than a batch, as in cluster."""
    epochs: PositiveInt = 1
    """Number of epochs. Each is packed anew."""
    seed: NonNegativeInt = 0
    """Seed of the order."""

    def _check(self) -> None:
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
                f"small_domains is {small}, which is only for random batches. For clusters, set it in the"
                " 'cluster' job, and leave it out here"
            )


# ``number``: of the domain. Without clusters a region has those pairs that ``draw``, a random number of each, tells.
UNCLUSTERED = """
    CREATE TABLE placed AS
    SELECT number, draw % regions AS region, row AS pair, -1::INTEGER AS cluster FROM stream JOIN groups USING (domain)
"""
IN_ORDER = "FROM placed ORDER BY number, region, pair"
IN_ORDER_WITH_ROWS = """
    SELECT placed.*, query_row, document_row FROM placed JOIN pairs ON row = pair ORDER BY number, region, pair
"""


class Part(NamedTuple):
    """A part of an epoch, its file ``number`` or its only one: the domains called ``names``, from number ``first`` on,
    or one ``region`` of a domain."""

    first: int
    names: Sequence[str]
    regions: int = 1
    region: int | None = None
    epoch: int = 0
    number: int | None = None


class Pack(Stage[PackConfig]):
    """An epoch is packed in parts, a file each: a few domains, or one region of a large domain. Regions are found
    first. The pairs that these set aside are redistributed, in as many shares."""

    command = "pack"
    kind = PACKING
    algorithm_version = 11
    config_class = PackConfig
    unit = "examples"

    def check_inputs(self, there: Set[str]) -> None:
        """Clusters of another kind than the order needs."""
        if "clusters" in there:
            _check_clusters(Artifact(str(self.config.clusters), CLUSTERS), self.config)

    def cost(self, read: Size) -> Cost:
        """A region of an epoch is a task, and so is what all of them set aside; random batches are shuffled."""
        rows, epochs, most = self.config.packing.batch_size, self.config.epochs, self.config.packing.region_pairs
        made = replace(read, rows=rows, batches=ceil(read.pairs / rows), epochs=epochs, disk=20 * epochs * read.pairs)
        each = 29e-6 if self.config.clusters else 0.44e-6
        return Cost(made, each * epochs * read.pairs, epochs * ceil(read.pairs / most))

    def phases(self) -> list[Phase]:
        """Pairs in order, parts of epochs, shares, epochs. Refuses inputs that don't go together."""
        config, groups = self.config, self._groups
        if config.pairs:
            self._check_pairs(Artifact(config.pairs, PAIRS))
        found = parts_of(groups.names, groups.sizes, self._regions(), config.packing.region_pairs)
        if len(found) > 1:
            found = [part._replace(number=number) for number, part in enumerate(found)]
        parts = [[part._replace(epoch=epoch) for part in found] for epoch in range(config.epochs)]
        shares = [[*filter(self._sets_aside, of_epoch)] for of_epoch in parts]
        return [
            Phase(_PLACE, WHOLE, self._place),
            *phases_of_epochs(_PARTS, parts, self._make_part),
            *phases_of_epochs(_SHARES, shares, self._make_share),
            Phase("epoch", range(config.epochs), self._make_epoch, intermediate=False),
        ]

    @cached_property
    def _groups(self) -> DomainGroups:
        config = self.config
        if not config.clusters:
            return groups_of(Artifact(str(config.pairs), PAIRS), config.packing.batch_size, config.small_domains)
        shards = Artifact(config.clusters, CLUSTERS).shards
        names, sizes = zip(*((str(shard.facts["domain"]), shard.rows) for shard in shards), strict=True)
        return DomainGroups(names, sizes, {}, 0)

    def _regions(self) -> list[int]:
        """Number of regions in each domain."""
        most = self.config.packing.region_pairs
        if not self.config.clusters:
            return [ceil(size / most) for size in self._groups.sizes]
        shards = Artifact(self.config.clusters, CLUSTERS).shards
        return [number_of_regions(shard.rows, int(shard.counts["clusters"]), most) for shard in shards]

    def _check_pairs(self, pairs: Artifact) -> None:
        if self.config.clusters:
            require_same_origin("pairs", Artifact(self.config.clusters, CLUSTERS), pairs)
        if self.config.vectors:
            require_same_origin("collection", pairs, StoredVectors(self.config.vectors))

    def _sets_aside(self, part: Part) -> bool:
        """Whether some of its pairs are to be dealt with those of the domain's other regions."""
        return part.region is not None and self.config.packing.shuffled_share(part.epoch) > 0

    def _place(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Places all pairs, domain after domain, region after region; for the polish with the rows of their texts."""
        config = self.config
        with open_relations(config, writer.path("spill")) as db:
            if config.clusters:
                db.load("CREATE TABLE placed AS FROM stream", _PLACED, self._clustered())
            else:
                groups = self._groups.table()
                regions = pa.array(self._regions()).take(groups["number"])
                groups = groups.append_column("regions", regions)
                db.load("CREATE TABLE groups AS FROM stream", groups.schema, [groups])
                db.load(UNCLUSTERED, *_with_draws(*self._numbered("domain"), config.seed))
            if config.packing.polish_sweeps:
                db.load("CREATE TABLE pairs AS FROM stream", *self._numbered(*_ROWS))
                db.write(IN_ORDER_WITH_ROWS, writer.path(_ORDERED))
            else:
                db.write(IN_ORDER, writer.path(_ORDERED))
        writer.add(_ORDERED)
        return writer.commit()

    def _numbered(self, *columns: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        return numbered_rows(Artifact(str(self.config.pairs), PAIRS), "pairs/", *columns)

    def _clustered(self) -> Iterator[pa.Table]:
        """The pairs of each domain with their clusters. Regions have near clusters if a tour will visit them, else
        any."""
        clusters = Artifact(str(self.config.clusters), CLUSTERS)
        for number, count in enumerate(self._regions()):
            domain = read_domain(clusters, number)
            sizes = np.bincount(domain.clusters, minlength=len(domain.centroids))
            if count == 1:
                regions = np.zeros(len(sizes), dtype=np.int64)
            elif self.config.packing.order == "tour":
                regions = divide(domain.centroids, sizes, count).astype(np.int64)
            else:
                regions = np.random.default_rng([self.config.seed, number]).permutation(len(sizes)) % count
            rows = np.bincount(regions, sizes)
            regions = np.where(rows[regions] < self.config.packing.batch_size, rows.argmax(), regions)
            columns = [np.full(len(domain.pairs), number), regions[domain.clusters], domain.pairs, domain.clusters]
            yield pa.table(columns, schema=_PLACED)

    def _make_part(self, part: Part, writer: ShardWriter) -> ShardRecord:
        """Some domains of one epoch, or a region of one; beside it pairs to be dealt with those of other regions."""
        config = self.config
        rows = shuffled = 0
        aside = np.empty((2, 0), dtype=np.int64)
        with _writer(writer, part, "part") as file:
            for number, name, placed in self._domains(part):
                pairs, clusters = (placed[column].to_numpy() for column in ("pair", "cluster"))
                own, labels = np.unique(clusters, return_inverse=True)
                packed = pack(
                    labels.astype(np.int32),
                    self._centroids(number)[own],
                    config.packing,
                    config.seed,
                    part.epoch,
                    number,
                    vectors=self._vectors(placed) if config.packing.polish_sweeps else None,
                    region=part.region,
                )
                _write(file, name, pairs, clusters, packed.batches.ravel())
                aside = np.stack([pairs[packed.aside], clusters[packed.aside]])
                shuffled += packed.shuffled
                rows += packed.batches.size
        if self._sets_aside(part):
            writer.add_array(_ASIDE.format(part.epoch, part.number), aside)
        return writer.commit(facts={"shuffled": shuffled, "rows": rows})

    def _domains(self, part: Part) -> Iterator[tuple[int, str, pa.Table]]:
        """The number and name of each domain of a part, and what was placed there."""
        numbers = range(part.first, part.first + len(part.names))
        chosen: list[Any] = [("number", ">=", numbers.start), ("number", "<", numbers.stop)]
        chosen += [("region", "==", part.region)] if part.region is not None else []
        placed = pq.read_table(earlier_file(self.config.output, _PLACE, _ORDERED), filters=chosen)
        bounds = np.searchsorted(placed["number"].to_numpy(), [*numbers, numbers.stop]).tolist()
        for number, name, (begin, end) in zip(numbers, part.names, pairwise(bounds), strict=True):
            yield number, name, placed.slice(begin, end - begin)

    def _centroids(self, number: int) -> NDArray[np.float32]:
        """The centroids of a domain. A single one at zero for pairs without clusters."""
        if not self.config.clusters:
            return np.zeros((1, 1), dtype=np.float32)
        return read_centroids(Artifact(self.config.clusters, CLUSTERS), number)

    def _vectors(self, placed: pa.Table) -> "VectorsOf":
        """Reads the vectors of pairs by their places, those of a few at a time."""
        query_rows, document_rows = (placed[name].to_numpy() for name in _ROWS)
        vectors = StoredVectors(str(self.config.vectors))
        return StoredPairs(vectors, query_rows=query_rows, document_rows=document_rows).take

    def _make_share(self, part: Part, writer: ShardWriter) -> ShardRecord:
        """Packs one share of the pairs that all regions of a domain have set aside, as much as one region."""
        assert part.region is not None
        assert part.number is not None
        first, size = part.number - part.region, self.config.packing.batch_size
        names = (_ASIDE.format(part.epoch, first + region) for region in range(part.regions))
        aside = [np.load(io.BytesIO(writer.read(name))).T for name in names]
        shares = min(part.regions, max(1, sum(map(len, aside)) // size))  # a batch at least
        found = [rows[share(len(rows), part.region, shares, region % shares)] for region, rows in enumerate(aside)]
        pairs, clusters = np.concatenate(found).T
        place = [part.first, part.region, _SHARE]
        order = np.random.default_rng([self.config.seed, part.epoch, *place]).permutation(len(pairs))
        batches = whole_batches(order, size)
        with _writer(writer, part, "dealt") as file:
            _write(file, part.names[0], pairs, clusters, batches.ravel())
        return writer.commit(facts={"shuffled": len(batches), "rows": batches.size})

    def _make_epoch(self, epoch: int, writer: ShardWriter) -> ShardRecord:
        """One epoch, domain by domain; a row is an example, ``batch_size`` rows after one another a batch.

        Its files are those of its parts, then of the shares of what regions have set aside.
        """
        config, size = self.config, self.config.packing.batch_size
        shards = [shard for name in (_PARTS, _SHARES) for shard in earlier_shards(config.output, f"{name}{epoch:05d}")]
        records = [earlier_record(config.output, shard) for shard in shards]
        writer.adopt([record.files[0] for record in records if record.facts["rows"]])
        rows, shuffled = (sum(record.facts[name] for record in records) for name in ("rows", "shuffled"))
        dropped = self._groups.dropped
        return writer.commit(
            rows,
            counts={"batches": rows // size},
            dropped={"pairs of small domains": dropped} if dropped else {},
            facts={
                "epoch": epoch,
                "batch_size": size,
                "pairs": sum(self._groups.sizes),
                "origins": {"pairs": origin(Artifact(str(config.clusters or config.pairs)), PAIRS)},
                "shuffled": shuffled,
            },
        )

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which pairs the numbers mean, and how these were clustered."""
        found = Artifact(self.config.clusters, CLUSTERS).config if self.config.clusters else {}
        kept = ("cluster_size", "smallest_domain", "small_domains", "kmeans")
        clusters = {name: found[name] for name in kept if name in found}
        return {"origins": records[0].facts["origins"], "clusters": clusters}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        size = artifact.config["packing"]["batch_size"]
        return f"{batches} of {size} in {counted(artifact.config['epochs'], 'epoch')}"


def _with_draws(schema: pa.Schema, tables: Iterator[pa.Table], seed: int) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Adds a random number for each row, ``draw``."""
    field, key = pa.field("draw", pa.uint64()), string_hashes([f"regions {seed}"])
    drawn = (table.append_column(field, pa.array(numbers_at(key, table["row"].to_numpy()))) for table in tables)
    return schema.append(field), drawn


@contextmanager
def _writer(writer: ShardWriter, part: Part, what: str) -> Iterator[pq.ParquetWriter]:
    """Writer of an epoch's packed pairs, one file."""
    file = "packing" if part.number is None else f"{what}-{part.number:05d}"
    name = f"epoch={part.epoch:05d}/{file}.parquet"
    with pq.ParquetWriter(writer.path(name), SCHEMA, compression="zstd") as stored:
        yield stored
    writer.add(name)


def _write(
    file: pq.ParquetWriter,
    domain: str,
    pairs: NDArray[np.int64],
    clusters: NDArray[np.integer],
    items: NDArray[np.int64],
) -> None:
    for start in range(0, len(items), _ROW_GROUP):
        chosen = items[start : start + _ROW_GROUP]
        columns = [pairs[chosen], clusters[chosen].astype(np.int32), pa.repeat(domain, len(chosen))]
        file.write_table(pa.table(columns, schema=SCHEMA))


def _check_clusters(clusters: Artifact, config: PackConfig) -> None:
    sides = clusters.manifest["facts"].get("sides", "both")
    if config.packing.order == "topics" and sides != "queries":
        raise UserError(
            f"packing.order topics draws every batch from one cluster of queries, but {clusters.uri} has clusters"
            " of pairs. Cluster with kmeans.sides queries, or set packing.order to tour or random."
        )


def parts_of(names: Sequence[str], pairs: Sequence[int], regions: Sequence[int], most: int) -> list[Part]:
    """The parts of an epoch for tasks, in the order of the domains: ``most`` pairs or little more, or a region."""
    parts: list[Part] = []
    first, waiting = 0, 0
    for number, (size, count) in enumerate(zip(pairs, regions, strict=True)):
        waiting += size
        if count > 1 and first < number:
            parts.append(Part(first, names[first:number]))
        if count > 1:
            parts += [Part(number, names[number : number + 1], count, region) for region in range(count)]
        elif waiting >= most or number + 1 == len(pairs):
            parts.append(Part(first, names[first : number + 1]))
        else:
            continue
        first, waiting = number + 1, 0
    return parts
