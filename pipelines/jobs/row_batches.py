"""What `raytriever group` and `raytriever lists` share: batches whose rows are written as they are, in an order."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipelines.batches import BATCHES, LAYOUTS, BatchFile, Layout
from pipelines.grouping import GroupingSettings, Stretches, group_batches
from pipelines.jobs.lookups import add_array, map_array, open_parts, part_shards, write_part
from pipelines.pairs.pairs import SmallDomains, keep_domains
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.table import counted
from raytriever.stages.stage import Shard, Stage, StageConfig

_ROWS_AT_ONCE = 2048
_STRETCHES = ("first", "lengths", "documents", "groups")


class RowBatchesConfig(StageConfig):
    """How many epochs of batches, and what becomes of domains that can't fill one.

    ``batches_per_epoch``: so many of those that an epoch could have, drawn at random by ``seed``, fewer being among
    more; None: all.
    """

    small_domains: SmallDomains = "refuse"
    epochs: int = Field(default=1, gt=0)
    batches_per_epoch: int | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0)
    batches_per_shard: int = Field(default=1_000, gt=0)


Config = TypeVar("Config", bound=RowBatchesConfig)


class RowBatches(Stage[Config]):
    """Three phases: the rows, to be read in any order, and what is known of them; each epoch's order; its batches.

    Subclasses say what the rows are and which belong together.
    """

    kind = BATCHES
    unit = "examples"
    layout: ClassVar[Layout]
    rows_in_words: ClassVar[str]

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

    def _grouped(self) -> tuple[Stretches, int]:
        """The stretches with the groups that batches are made within, and the rows of domains that are dropped."""
        stretches, names = self.read_stretches()
        counts = np.bincount(stretches.groups, stretches.lengths, minlength=len(names)).astype(np.int64)
        size, small = self.grouping().batch_size, self.config.small_domains
        group_of = keep_domains(names, counts, size, small, self.rows_in_words)
        grouped = Stretches(stretches.first, stretches.lengths, stretches.documents, group_of[stretches.groups])
        return grouped, int(counts[group_of < 0].sum())

    def resolved(self) -> dict[str, Any]:
        """Without ``batches_per_epoch`` where it isn't set."""
        values = super().resolved()
        if values["batches_per_epoch"] is None:
            del values["batches_per_epoch"]
        return values

    def plan(self) -> list[Shard]:
        """Three phases; refuses rows that don't make one batch, or not as many as are asked for."""
        stretches, dropped = self._grouped()
        size, per_shard = self.grouping().batch_size, self.config.batches_per_shard
        rows = stretches.rows_of_groups()
        possible = int((rows // size).sum())
        batches = self.config.batches_per_epoch or possible
        if batches > possible:
            raise UserError(
                f"batches_per_epoch is {batches:,}, but {self.rows_of()[0].uri} makes only {possible:,}. Lower it, or"
                " leave it out for all of them."
            )
        parts = part_shards("rows", *self.rows_of())
        shards = [*parts, Shard("stretches", {"make": "stretches"}, intermediate=True)]
        for epoch in range(self.config.epochs):
            order = Shard(f"order-{epoch:05d}", {"make": "order", "epoch": epoch}, phase=1, intermediate=True)
            shards.append(order)
            for number, first in enumerate(range(0, batches, per_shard)):
                description = {"make": "batches", "epoch": epoch, "number": number, "order": order.name}
                description |= {"first": first, "batches": min(per_shard, batches - first), "parts": len(parts)}
                if not number:  # what an epoch leaves out is counted with its first shard
                    not_drawn = (possible - batches) * size
                    description["dropped"] = self._dropped(int((rows % size).sum()), dropped, not_drawn)
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
                stretches, _ = self._grouped()
                for name in _STRETCHES:
                    add_array(writer, f"lookup/{name}.npy", getattr(stretches, name))
                return writer.commit(0)
            case "order":
                return self._make_order(shard, writer)
        return self._make_batches(shard, writer)

    def _make_order(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        output, epoch = self.config.output, shard.description["epoch"]
        stretches = Stretches(*(map_array(output, "stretches", f"lookup/{name}.npy") for name in _STRETCHES))
        batches = group_batches(stretches, self.grouping(), self.config.seed, epoch)
        if self.config.batches_per_epoch:
            drawn = np.random.default_rng([self.config.seed, epoch]).permutation(len(batches))
            batches = batches[np.sort(drawn[: self.config.batches_per_epoch])]
        add_array(writer, _order_name(shard.name), batches)
        return writer.commit(0)

    def _make_batches(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        described, output, size = shard.description, self.config.output, self.grouping().batch_size
        rows = open_parts(output, "rows", described["parts"])
        order = map_array(output, described["order"], _order_name(described["order"]))
        order = order[described["first"] : described["first"] + described["batches"]]
        at_once = max(1, _ROWS_AT_ONCE // size)
        counts = Counter[str]()
        schema = LAYOUTS[self.layout].schema()
        with BatchFile(writer, schema, described["epoch"], described["number"], size) as file:
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
        size = artifact.shards[0].facts["batch_size"]
        return f"{batches} of {size} in {counted(artifact.config['epochs'], 'epoch')}"


def _order_name(shard: str) -> str:
    return f"lookup/{shard}.npy"
