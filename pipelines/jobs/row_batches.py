"""`raytriever group` and `raytriever lists`: batches of rows that are written unchanged, in an order."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from pipelines.batches import BATCHES, LAYOUTS, BatchReader, BatchWriter, Layout
from pipelines.grouping import GroupingSettings, Stretches, group_batches, single_rows
from pipelines.jobs.lookups import earlier_record, earlier_shards, groups_of_files, map_array, open_parts, write_part
from pipelines.mining.candidates import StoredCandidates
from pipelines.pairs.pairs import SmallDomains, keep_domains, numbered_domains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.relations import numbered_rows, open_relations
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Run, Stage, StageConfig, batch_phases, phases_of_epochs
from retrieval.collections.collection import ParquetRows, StoredCollection

_ROWS_AT_ONCE = 2048
_CHUNK_PLACES = ["source_id", "number", "domain"]
_LIST_COLUMNS = ["query_id", "query_row", "document_ids", "document_rows", "scores", "relevance"]


class RowBatchesConfig(StageConfig):
    """The number of epochs and batches, and how domains are handled that can't fill a batch."""

    small_domains: SmallDomains = "refuse"
    """What to do with domains that can't fill a batch. refuse: stop. merge: batch them together. merge_all: treat all
    domains as one. drop: leave them out."""
    epochs: PositiveInt = 1
    """Number of epochs. Each is made anew."""
    batches_per_epoch: PositiveInt | None = None
    """Number of batches, drawn at random from those of an epoch. A smaller number draws a subset of a larger one's.
    null: all."""
    seed: NonNegativeInt = 0
    """Seed of the order, and of the rows that each epoch leaves out."""
    batches_per_shard: PositiveInt = 1_000
    """Batches in a file. One task makes one file."""


Config = TypeVar("Config", bound=RowBatchesConfig)


class Order(NamedTuple):
    """The batches ``first`` to ``stop`` of those ``possible`` in an epoch, which are of ``groups``."""

    epoch: int
    groups: tuple[int, int]
    first: int
    stop: int
    possible: int


class RowBatches(Stage[Config]):
    """Batches of rows in an order. Subclasses define the rows, which belong together, and whether epochs share them.

    The rows are stored to be read in any order. Each epoch's order is made by many tasks if there are many rows. Then
    its batches are written, unless training reads the order.
    """

    kind = BATCHES
    unit = "examples"
    layout: ClassVar[Layout]
    rows_in_words: ClassVar[str]
    shared: ClassVar[bool] = False  # True: rows are stored once, for all epochs
    rows_of_an_order: ClassVar[int] = 1 << 21  # of a group, and of the groups that one task orders, about

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
        """What to count of a batch."""
        return {}

    def _grouped(self) -> tuple[Stretches, int]:
        """The stretches with the groups that batches are made within, and the rows of domains that are dropped."""
        stretches, names = self.read_stretches()
        counts = np.bincount(stretches.groups, stretches.lengths, minlength=len(names)).astype(np.int64)
        size, small = self.grouping().batch_size, self.config.small_domains
        group_of = keep_domains(names, counts, size, small, self.rows_in_words)
        grouped = Stretches(stretches.first, stretches.lengths, stretches.documents, group_of[stretches.groups])
        return grouped.divided(self.rows_of_an_order, self.config.seed), int(counts[group_of < 0].sum())

    def cost(self, read: Size) -> Cost:
        """Runs of batches are tasks."""
        rows, epochs = self.grouping().batch_size, self.config.epochs
        batches = self.config.batches_per_epoch or (read.queries("train") if self.shared else read.documents) // rows
        made = replace(read, rows=rows, batches=batches, pairs=batches * rows, epochs=epochs)
        times = 1 if self.shared else epochs
        made = replace(made, disk=times * made.epoch_bytes)
        return Cost(made, 32e-6 * times * made.pairs, times * ceil(batches / self.config.batches_per_shard))

    def phases(self) -> list[Phase]:
        """Rows and stretches, orders, batches; refuses rows that don't make one batch, or not as many as asked for."""
        stretches, _ = self._grouped()
        size = self.grouping().batch_size
        rows = stretches.rows_of_groups()
        possible = int((rows // size).sum())
        batches = self.config.batches_per_epoch or possible
        if batches > possible:
            raise UserError(
                f"batches_per_epoch is {batches:,}, but {self.rows_of()[0].uri} makes only {possible:,}. Lower it, or"
                " leave it out for all of them."
            )
        orders = [self._orders(epoch, rows) for epoch in range(self.config.epochs)]
        phases = [
            Phase("rows", groups_of_files(*self.rows_of()), self._map_rows, intermediate=not self.shared),
            Phase("stretches", WHOLE, self._store_stretches, beside=True),
        ]
        if self.shared:
            return [*phases, Phase("order", [*chain(*orders)], self._make_order, intermediate=False)]
        phases += phases_of_epochs("order-", orders, self._make_order)
        return phases + batch_phases([batches] * len(orders), self.config.batches_per_shard, self._make_batches)

    def _orders(self, epoch: int, rows: NDArray[np.int64]) -> list[Order]:
        """Each orders some groups, or, where training reads the order, all."""
        bounds = np.cumsum([0, *rows // self.grouping().batch_size]).tolist()
        task = np.zeros_like(rows) if self.shared else (np.cumsum(rows) - 1) // self.rows_of_an_order
        groups = pairwise([*np.unique(task, return_index=True)[1].tolist(), len(rows)])
        return [Order(epoch, (first, end), bounds[first], bounds[end], bounds[-1]) for first, end in groups]

    def _drawn(self, order: Order) -> NDArray[np.int64]:
        """Which of an order's batches are among those of the epoch, counted from its first."""
        if not self.config.batches_per_epoch:
            return np.arange(order.stop - order.first)
        drawn = np.random.default_rng([self.config.seed, order.epoch]).permutation(order.possible)
        drawn = np.sort(drawn[: self.config.batches_per_epoch])
        return np.asarray(drawn[(drawn >= order.first) & (drawn < order.stop)] - order.first)

    def total_rows(self) -> int:
        """Examples of all batches."""
        tasks = chain(*(phase.tasks for phase in self._phases.values()))
        possible = next(task.possible for task in tasks if isinstance(task, Order))
        return (self.config.batches_per_epoch or possible) * self.config.epochs * self.grouping().batch_size

    def _map_rows(self, files: list[str], writer: ShardWriter) -> ShardRecord:
        return write_part(writer, LAYOUTS[self.layout].schema(), self.tables(files))

    def _store_stretches(self, _: None, writer: ShardWriter) -> ShardRecord:
        """The stretches with their groups, and how many rows an epoch leaves out."""
        stretches, of_small_domains = self._grouped()
        for name, array in vars(stretches).items():
            writer.add_array(f"lookup/stretches-{name}.npy", array)
        size, rows = self.grouping().batch_size, stretches.rows_of_groups()
        possible = int((rows // size).sum())
        not_drawn = (possible - (self.config.batches_per_epoch or possible)) * size
        left_out = {
            "that fill no batch of their domain in an epoch": int((rows % size).sum()),
            "of domains that are too small for a batch": of_small_domains,
            "of batches that were not drawn": not_drawn,
        }
        facts = {f"{self.rows_in_words} {reason}": count for reason, count in left_out.items() if count}
        return writer.commit(facts=facts)

    def _left_out(self) -> dict[str, int]:
        return earlier_record(self.config.output, "stretches").facts

    def _make_order(self, order: Order, writer: ShardWriter) -> ShardRecord:
        """The rows of some of one epoch's batches, (batches, batch_size)."""
        names = (f"lookup/stretches-{field.name}.npy" for field in fields(Stretches))
        stretches = Stretches(*(map_array(self.config.output, "stretches", name) for name in names))
        made = group_batches(stretches, self.grouping(), self.config.seed, order.epoch, slice(*order.groups))
        made = made[self._drawn(order)]
        writer.add_array(_order_name(writer.name), made)
        if not self.shared:
            return writer.commit()
        facts = {"epoch": order.epoch, "batches": len(made), "batch_size": made.shape[1]}
        return writer.commit(made.size, counts={"batches": len(made)}, dropped=self._left_out(), facts=facts)

    def _make_batches(self, run: Run, writer: ShardWriter) -> ShardRecord:
        output, size = self.config.output, self.grouping().batch_size
        rows, order = open_parts(output, "rows"), self._rows_of(run)
        at_once = max(1, _ROWS_AT_ONCE // size)
        counts = Counter[str]()
        schema = LAYOUTS[self.layout].schema()
        with BatchWriter(writer, schema, run.epoch, run.number, size) as file:
            for start in range(0, len(order), at_once):
                block = rows.take(order[start : start + at_once].ravel())
                for begin in range(0, len(block), size):
                    batch = block.slice(begin, size)
                    counts.update(self.count(batch))
                    file.write(batch)
        return file.commit(counts, {} if run.number else self._left_out())  # which is counted once an epoch

    def _rows_of(self, run: Run) -> NDArray[np.int64]:
        """The rows of the run's batches, (batches, batch_size); only these are read."""
        found, place = list[NDArray[np.int64]](), 0
        for shard in earlier_shards(self.config.output, f"order-{run.epoch:05d}"):
            order = map_array(self.config.output, shard, _order_name(shard))
            found.append(order[max(run.first - place, 0) : max(run.last - place, 0)])
            place += len(order)
        return np.concatenate(found)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The layout."""
        return {"layout": self.layout}

    def summary(self, artifact: Artifact) -> str:
        """Batches and epochs."""
        batches = counted(artifact.manifest["counts"]["batches"], "batch", "batches")
        return f"{batches} of {BatchReader(artifact.uri).batch_size} in {counted(artifact.config['epochs'], 'epoch')}"


def _order_name(shard: str) -> str:
    return f"lookup/{shard}.npy"


class GroupConfig(RowBatchesConfig):
    """Which chunks, and how they become batches."""

    collection: InputPath
    """A collection that `raytriever chunk` made."""
    grouping: GroupingSettings = GroupingSettings()
    """How chunks are grouped."""


STRETCHES = """
    WITH places AS (
        SELECT *, source_id IS DISTINCT FROM lag(source_id) OVER rows AS is_new_source,
            is_new_source OR domain <> lag(domain) OVER rows OR number <> lag(number) OVER rows + 1 AS begins
        FROM chunks WINDOW rows AS (ORDER BY row)
    )
    SELECT row AS first, lead(row, 1, $chunks) OVER stretches - row AS length,
        (sum(is_new_source::INTEGER) OVER stretches)::BIGINT AS document, domain
    FROM places WHERE begins WINDOW stretches AS (ORDER BY row) ORDER BY row
"""


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
                f"The documents of {collection.uri} have no column {', '.join(lacking)}, so they are no chunks."
                " Cut them first (raytriever chunk), and group the result."
            )
        if not collection.count("documents"):
            raise UserError(f"{collection.uri} has no chunks. Was there text to cut?")
        return collection

    def rows_of(self) -> tuple[Artifact, str]:
        """The chunks."""
        return self._collection(), "documents/"

    def grouping(self) -> GroupingSettings:
        """The settings' own."""
        return self.config.grouping

    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The chunks with their places in their sources."""
        for table in ParquetRows(self._collection(), files).tables(["id", "text", *_CHUNK_PLACES]):
            yield table.rename_columns(["document_id", "document", *_CHUNK_PLACES])

    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Consecutive chunks of one source and domain; where a number is missing, a new stretch begins."""
        collection = self._collection()
        chunks = numbered_rows(collection, "documents/", *_CHUNK_PLACES)
        with TemporaryDirectory() as spill, open_relations(self.config, Path(spill)) as db:
            db.load("CREATE TABLE chunks AS FROM stream", *chunks)
            found = pa.concat_tables(db.tables(STRETCHES, chunks=collection.count("documents")))
        groups, names = numbered_domains(found["domain"])
        first, lengths, documents = (found[name].to_numpy() for name in ("first", "length", "document"))
        return Stretches(first, lengths, documents, groups), names

    def count(self, batch: pa.Table) -> dict[str, int]:
        """Counts the batch's sources."""
        return {_of_sources(pc.count_distinct(batch["source_id"]).as_py()): 1}

    def summary(self, artifact: Artifact) -> str:
        """Batches, and of how many sources they are."""
        counts = artifact.manifest["counts"]
        numbers = range(BatchReader(artifact.uri).batch_size + 1)
        sources = sum(number * counts.get(_of_sources(number), 0) for number in numbers)
        return f"{super().summary(artifact)}, of {sources / counts['batches']:.2f} sources on average"


def _of_sources(number: int) -> str:
    return f"batches of {number} sources"


class ListsConfig(RowBatchesConfig):
    """Which lists, and how many of them make a batch."""

    candidates: InputPath
    """Candidates mined in the form ``labelled_lists`` from ``collection``."""
    collection: InputPath
    """The collection with the queries' texts and domains."""
    batch_size: int = Field(default=32, gt=1)
    """Number of queries in a batch."""
    order: Literal["grouped", "random"] = "grouped"
    """grouped: a batch has queries of one domain. random: it has queries of any domain."""


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
        of_queries, names = numbered_domains(collection.rows_of("queries").read(["domain"])["domain"])
        rows = np.concatenate([table["query_row"].to_numpy() for table in candidates.tables(["query_row"])])
        return single_rows(of_queries[rows]), names
