"""`raytriever group` and `raytriever lists`: batches whose rows are written as they are, in an order."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from math import ceil
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from pipelines.batches import BATCHES, LAYOUTS, BatchWriter, Layout
from pipelines.grouping import GroupingSettings, Stretches, group_batches, single_rows
from pipelines.jobs.lookups import map_array, open_parts, part_shards, write_part
from pipelines.mining.candidates import StoredCandidates
from pipelines.pairs.pairs import DomainNumbers, SmallDomains, keep_domains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import ParquetRows, StoredCollection

_ROWS_AT_ONCE = 2048
_ROWS_OF_AN_ORDER = 1 << 21  # of a group, and of the groups that one task orders, about
_CHUNK_PLACES = ["source_id", "number", "domain"]
_LIST_COLUMNS = ["query_id", "query_row", "document_ids", "document_rows", "scores", "relevance"]


class RowBatchesConfig(StageConfig):
    """How many epochs of batches, and what becomes of domains that can't fill one."""

    small_domains: SmallDomains = "refuse"
    """What becomes of domains that can't fill a batch."""
    epochs: int = Field(default=1, gt=0)
    """Epochs to make, each anew."""
    batches_per_epoch: int | None = Field(default=None, gt=0)
    """So many of those that an epoch could have, drawn at random, fewer being among more; None: all."""
    seed: int = Field(default=0, ge=0)
    """Of the order, and of what each epoch leaves out."""
    batches_per_shard: int = Field(default=1_000, gt=0)
    """Batches of a file, each made by one task."""


Config = TypeVar("Config", bound=RowBatchesConfig)


class RowBatches(Stage[Config]):
    """The rows, to be read in any order, and which of them belong together; each epoch's order, by many tasks where
    there are many rows; its batches, but where training reads the order.

    Subclasses say what the rows are and which belong together, and whether epochs share the stored rows.
    """

    kind = BATCHES
    unit = "examples"
    layout: ClassVar[Layout]
    rows_in_words: ClassVar[str]
    shared: ClassVar[bool] = False  # True: rows are stored once, for all epochs

    @abstractmethod
    def rows_of(self) -> tuple[Artifact, str]:
        """The artifact that has the rows, and the folder of their files in it."""

    @abstractmethod
    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The rows of some of these files, in order, with the columns of the layout."""

    @abstractmethod
    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Which rows belong together, their groups being domains; and the domains' names. Checks the input."""

    @abstractmethod
    def grouping(self) -> GroupingSettings:
        """How rows become batches."""

    def count(self, batch: pa.Table) -> dict[str, int]:  # noqa: ARG002
        """What is to be counted of a batch."""
        return {}

    def _grouped(self, most: int) -> tuple[Stretches, int]:
        """The stretches with the groups that batches are made within, divided by ``most``, and the rows dropped."""
        stretches, names = self.read_stretches()
        counts = np.bincount(stretches.groups, stretches.lengths, minlength=len(names)).astype(np.int64)
        size, small = self.grouping().batch_size, self.config.small_domains
        group_of = keep_domains(names, counts, size, small, self.rows_in_words)
        grouped = Stretches(stretches.first, stretches.lengths, stretches.documents, group_of[stretches.groups])
        return grouped.divided(most, self.config.seed), int(counts[group_of < 0].sum())

    def cost(self, read: Size) -> Cost:
        """Runs of batches are tasks."""
        rows, epochs = self.grouping().batch_size, self.config.epochs
        batches = self.config.batches_per_epoch or (read.queries("train") if self.shared else read.documents) // rows
        made = replace(read, rows=rows, batches=batches, pairs=batches * rows, epochs=epochs)
        times = 1 if self.shared else epochs
        made = replace(made, disk=times * made.epoch_bytes)
        return Cost(made, 32e-6 * times * made.pairs, times * ceil(batches / self.config.batches_per_shard))

    def plan(self) -> list[Shard]:
        """Three phases; refuses rows that don't make one batch, or not as many as are asked for."""
        stretches, dropped = self._grouped(_ROWS_OF_AN_ORDER)
        size = self.grouping().batch_size
        rows = stretches.rows_of_groups()
        possible = int((rows // size).sum())
        batches = self.config.batches_per_epoch or possible
        if batches > possible:
            raise UserError(
                f"batches_per_epoch is {batches:,}, but {self.rows_of()[0].uri} makes only {possible:,}. Lower it, or"
                " leave it out for all of them."
            )
        parts = part_shards("rows", *self.rows_of(), intermediate=not self.shared)
        left_out = self._dropped(int((rows % size).sum()), dropped, (possible - batches) * size)
        shards = [*parts, Shard("stretches", {"make": "stretches", "most": _ROWS_OF_AN_ORDER}, intermediate=True)]
        for epoch in range(self.config.epochs):
            orders = self._orders(epoch, rows, possible)
            runs = [] if self.shared else self._runs_of_batches(epoch, orders, len(parts))
            shards += [*orders, *runs]
            (runs or orders)[0].description["dropped"] = left_out  # what an epoch leaves out is counted once
        return shards

    def _orders(self, epoch: int, rows: NDArray[np.int64], possible: int) -> list[Shard]:
        """Each orders some groups, or, where training reads the order, all."""
        stops = np.cumsum(rows // self.grouping().batch_size)
        task = np.zeros_like(rows) if self.shared else (np.cumsum(rows) - 1) // _ROWS_OF_AN_ORDER
        shards: list[Shard] = []
        for number in np.unique(task).tolist():
            first, last = np.flatnonzero(task == number)[[0, -1]].tolist()
            batches = [int(stops[first - 1]) if first else 0, int(stops[last])]
            described = {"make": "order", "epoch": epoch, "groups": [first, last + 1], "of": [*batches, possible]}
            if held := len(self._drawn(described)):
                described |= {"batches" if self.shared else "held": held}
                name = f"order-{epoch:05d}" + ("" if self.shared else f"-{len(shards):05d}")
                shards.append(Shard(name, described, phase=1, intermediate=not self.shared))
        return shards

    def _drawn(self, described: dict[str, Any]) -> NDArray[np.int64]:
        """Which of an order's batches are among those of the epoch, counted from its first."""
        first, stop, possible = described["of"]
        if not self.config.batches_per_epoch:
            return np.arange(stop - first)
        drawn = np.random.default_rng([self.config.seed, described["epoch"]]).permutation(possible)
        drawn = np.sort(drawn[: self.config.batches_per_epoch])
        return np.asarray(drawn[(drawn >= first) & (drawn < stop)] - first)

    def _runs_of_batches(self, epoch: int, orders: list[Shard], parts: int) -> list[Shard]:
        """Each writes some batches, which one order or several after one another have."""
        stops = np.cumsum([order.description["held"] for order in orders]).tolist()
        shards = []
        for number, first in enumerate(range(0, stops[-1], self.config.batches_per_shard)):
            batches = min(self.config.batches_per_shard, stops[-1] - first)
            begin, end = np.searchsorted(stops, [first, first + batches - 1], side="right").tolist()
            description = {"make": "batches", "epoch": epoch, "number": number, "parts": parts, "batches": batches}
            description |= {"orders": [order.name for order in orders[begin : end + 1]]}
            description |= {"first": first - (stops[begin - 1] if begin else 0)}
            shards.append(Shard(f"epoch={epoch:05d}-{number:05d}", description, phase=2))
        return shards

    def _dropped(self, left_over: int, of_small_domains: int, not_drawn: int) -> dict[str, int]:
        counted = {
            f"{self.rows_in_words} that fill no batch of their domain in an epoch": left_over,
            f"{self.rows_in_words} of domains that are too small for a batch": of_small_domains,
            f"{self.rows_in_words} of batches that were not drawn": not_drawn,
        }
        return {reason: count for reason, count in counted.items() if count}

    def total_rows(self, shards: list[Shard]) -> int:
        """Examples of all batches."""
        batches: int = sum(shard.description.get("batches", 0) for shard in shards)
        return batches * self.grouping().batch_size

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        match shard.description["make"]:
            case "rows":
                tables = self.tables(shard.description["files"])
                return write_part(writer, shard, LAYOUTS[self.layout].schema(), tables)
            case "stretches":
                for name, array in vars(self._grouped(shard.description["most"])[0]).items():
                    writer.add_array(f"lookup/stretches-{name}.npy", array)
                return writer.commit(0)
            case "order":
                order = self._order(shard.description)
                writer.add_array(_order_name(shard.name), order)
                if not self.shared:
                    return writer.commit(0)
                facts = {"epoch": shard.description["epoch"], "batches": len(order), "batch_size": order.shape[1]}
                counts = {"batches": len(order)}
                return writer.commit(order.size, counts=counts, dropped=shard.description["dropped"], facts=facts)
        return self._make_batches(shard, writer)

    def _order(self, described: dict[str, Any]) -> NDArray[np.int64]:
        """The rows of some of one epoch's batches, (batches, batch_size)."""
        names = (f"lookup/stretches-{field.name}.npy" for field in fields(Stretches))
        stretches = Stretches(*(map_array(self.config.output, "stretches", name) for name in names))
        groups, epoch = slice(*described["groups"]), described["epoch"]
        return group_batches(stretches, self.grouping(), self.config.seed, epoch, groups)[self._drawn(described)]

    def _make_batches(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        described, output, size = shard.description, self.config.output, self.grouping().batch_size
        rows = open_parts(output, "rows", described["parts"])
        order = np.concatenate([map_array(output, name, _order_name(name)) for name in described["orders"]])
        order = order[described["first"] : described["first"] + described["batches"]]
        at_once = max(1, _ROWS_AT_ONCE // size)
        counts = Counter[str]()
        schema = LAYOUTS[self.layout].schema()
        with BatchWriter(writer, schema, described["epoch"], described["number"], size) as file:
            for start in range(0, len(order), at_once):
                block = rows.take(order[start : start + at_once].ravel())
                for begin in range(0, len(block), size):
                    batch = block.slice(begin, size)
                    counts.update(self.count(batch))
                    file.write(batch)
        return file.commit(counts, described.get("dropped"))

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The layout."""
        return {"layout": self.layout}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        return f"{batches} of {_batch_size(artifact)} in {counted(artifact.config['epochs'], 'epoch')}"


def _batch_size(batches: Artifact) -> int:
    return next(int(shard.facts["batch_size"]) for shard in batches.shards if "batch_size" in shard.facts)


def _order_name(shard: str) -> str:
    return f"lookup/{shard}.npy"


class GroupConfig(RowBatchesConfig):
    """Which chunks, and how they become batches."""

    collection: InputPath
    """One that `raytriever chunk` made."""
    grouping: GroupingSettings = GroupingSettings()
    """How chunks are grouped."""


class Group(RowBatches[GroupConfig]):
    """Chunks of a few documents to batches, as Revela trains on."""

    command = "group"
    algorithm_version = 2
    config_class = GroupConfig
    layout = "chunks"
    rows_in_words = "chunks"

    def _collection(self) -> StoredCollection:
        """The chunked collection. Raises ``UserError`` for one of whole documents, and for an empty one."""
        collection = StoredCollection(self.config.collection)
        names = collection.names("documents/", ".parquet")
        lacking = [name for name in _CHUNK_PLACES if name not in pq.read_schema(collection.path(names[0])).names]
        if lacking:
            raise UserError(
                f"The documents of {collection.uri} have no column {', '.join(lacking)}, so they are no chunks. Cut"
                " them first (raytriever chunk), and group what that makes."
            )
        if not collection.count("documents"):
            raise UserError(f"{collection.uri} has no chunks. Was there text to cut?")
        return collection

    def rows_of(self) -> tuple[Artifact, str]:
        """The chunks."""
        return self._collection(), "documents/"

    def grouping(self) -> GroupingSettings:
        """As set."""
        return self.config.grouping

    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The chunks with their places in their sources."""
        for table in ParquetRows(self._collection(), files).tables(["id", "text", *_CHUNK_PLACES]):
            yield table.rename_columns(["document_id", "document", *_CHUNK_PLACES])

    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Consecutive chunks of one source and domain; where a number is missing, a new stretch begins."""
        collection = self._collection()
        rows = ParquetRows(collection, collection.names("documents/", ".parquet"))
        domains = DomainNumbers()
        found: list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]] = []
        start, last = 0, None
        for table in rows.tables(_CHUNK_PLACES):
            begins, is_new_source = _begins(table if last is None else pa.concat_tables([last, table]), last is None)
            found.append((start + begins, is_new_source, domains.of(table["domain"])[begins]))
            start, last = start + len(table), table.slice(len(table) - 1)
        first, is_new_source, of_first = (np.concatenate(parts) for parts in zip(*found, strict=True))
        lengths = np.diff(np.append(first, len(rows)))
        return Stretches(first, lengths, np.cumsum(is_new_source), of_first), domains.names

    def count(self, batch: pa.Table) -> dict[str, int]:
        """Of how many sources the batch is."""
        return {_of_sources(pc.count_distinct(batch["source_id"]).as_py()): 1}

    def summary(self, artifact: Artifact) -> str:
        """Batches, and of how many sources they are."""
        counts = artifact.manifest["counts"]
        sources = sum(number * counts.get(_of_sources(number), 0) for number in range(_batch_size(artifact) + 1))
        return f"{super().summary(artifact)}, of {sources / counts['batches']:.2f} sources on average"


def _begins(places: pa.Table, is_first: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where stretches begin, and whether their source is another than that of the row before.

    The first row of ``places`` only comes before what is asked about, unless ``is_first``.
    """
    same = {}
    for name in ("source_id", "domain"):
        column = places[name].combine_chunks()
        same[name] = pc.equal(column.slice(1), column.slice(0, len(column) - 1)).to_numpy(zero_copy_only=False)
    follows = np.diff(places["number"].to_numpy().astype(np.int64)) == 1
    is_new, is_break = ~same["source_id"], ~(same["source_id"] & same["domain"] & follows)
    if is_first:
        is_new, is_break = (np.append(True, flags) for flags in (is_new, is_break))
    begins = np.flatnonzero(is_break)
    return begins, is_new[begins]


def _of_sources(number: int) -> str:
    return f"batches of {number} sources"


class ListsConfig(RowBatchesConfig):
    """Which lists, and how many of them make a batch."""

    candidates: InputPath
    """Mined in the form ``labelled_lists`` from ``collection``."""
    collection: InputPath
    """The queries' texts and domains."""
    batch_size: int = Field(default=32, gt=1)
    """Queries of a batch."""
    order: Literal["grouped", "random"] = "grouped"
    """grouped: a batch's queries are of one domain; random: of any."""


class Lists(RowBatches[ListsConfig]):
    """Queries with labelled candidate lists to batches, as CODER trains on; an epoch shuffles the queries.

    Lists are stored once: 15 epochs of MS MARCO's 502,939 lists of 1,000 would be 80 GB.
    """

    command = "lists"
    algorithm_version = 4
    shared = True
    config_class = ListsConfig
    layout = "candidates"
    rows_in_words = "queries"

    def _inputs(self) -> tuple[StoredCandidates, StoredCollection]:
        candidates, collection = StoredCandidates(self.config.candidates), StoredCollection(self.config.collection)
        require_same_origin("collection", collection, candidates)
        if candidates.form != "labelled_lists":
            raise UserError(
                f"{candidates.uri} was mined in the form {candidates.form}, which lacks the positives. Mine again with"
                " 'form: labelled_lists'."
            )
        if not len(candidates):
            raise UserError(f"{candidates.uri} has no lists.")
        return candidates, collection

    def rows_of(self) -> tuple[Artifact, str]:
        """The lists."""
        return self._inputs()[0], "candidates/"

    def grouping(self) -> GroupingSettings:
        """Unrelated queries."""
        return GroupingSettings(batch_size=self.config.batch_size, documents_per_batch=1, order="random")

    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The lists with their queries' texts."""
        candidates, collection = self._inputs()
        queries = collection.rows_of("queries")
        for table in ParquetRows(candidates, files).tables(_LIST_COLUMNS):
            of_queries = queries.take(table["query_row"].to_numpy(), ["text", "domain"])
            yield pa.table(
                {
                    "query_id": table["query_id"],
                    "query": of_queries["text"],
                    "candidate_ids": table["document_ids"],
                    "candidate_rows": table["document_rows"],
                    "candidate_relevance": table["relevance"],
                    "candidate_scores": table["scores"],
                    "domain": of_queries["domain"],
                }
            )

    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Every list by itself; its query's domain is its group."""
        candidates, collection = self._inputs()
        if self.config.order == "random":
            return single_rows(np.zeros(len(candidates), dtype=np.int64)), ["(all)"]
        domains = DomainNumbers()
        of_queries = [domains.of(table["domain"]) for table in collection.rows_of("queries").tables(["domain"])]
        rows = np.concatenate([table["query_row"].to_numpy() for table in candidates.tables(["query_row"])])
        return single_rows(np.concatenate(of_queries)[rows]), domains.names
