"""What a format of exported batches is, and what is counted of them batch by batch: the figures of their card.

The format of the Hugging Face hub keeps every column: parquet with one row group a batch.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.batches import LAYOUTS, Layout
from pipelines.formats.training_examples import write_json_lines
from retrieval.collections.collection import schema_of


@dataclass
class Figures:
    """Counts over batches, and examples of each domain."""

    counts: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)

    def add(self, batch: pa.Table, layout: Layout) -> None:
        """Counts one batch."""
        self.counts.update({"batches": 1, "examples": len(batch)})
        self.counts.update(_COUNTED[layout](batch))
        domains = pc.value_counts(batch["domain"].combine_chunks())
        self.domains.update({item["values"]: item["counts"] for item in domains.to_pylist()})


def _count_pairs(batch: pa.Table) -> Mapping[str, int]:
    lengths = pc.list_value_length(batch["hard_negative_ids"])
    hard_negatives = _sum(lengths)
    return {
        "hard negatives": hard_negatives,
        "examples without a hard negative": _sum(pc.equal(lengths, 0)),
        "negatives": len(batch) * (len(batch) - 1 + hard_negatives),  # of all rows: the other documents of the batch
        "masked negatives": _sum(pc.list_value_length(batch["masked"])),
        "query characters": _sum(pc.utf8_length(batch["query"])),
        "document characters": _sum(pc.utf8_length(batch["document"])),
    }


def _count_chunks(batch: pa.Table) -> Mapping[str, int]:
    return {
        "sources of batches": pc.count_distinct(batch["source_id"]).as_py(),
        "document characters": _sum(pc.utf8_length(batch["document"])),
    }


def _count_candidates(batch: pa.Table) -> Mapping[str, int]:
    relevance = pc.list_flatten(batch["candidate_relevance"])
    return {
        "candidates": _sum(pc.list_value_length(batch["candidate_ids"])),
        "relevant candidates": _sum(pc.greater(relevance, 0)),
        "query characters": _sum(pc.utf8_length(batch["query"])),
    }


def _sum(values: pa.ChunkedArray) -> int:
    return int(pc.sum(values).as_py() or 0)


_COUNTED = {"pairs": _count_pairs, "chunks": _count_chunks, "candidates": _count_candidates}


class Batch(NamedTuple):
    """One stored batch and its place."""

    epoch: int
    number: int
    rows: pa.Table


class Column(NamedTuple):
    """A column of the published files, for the card."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class Published:
    """The written batches, which a card describes."""

    layout: Layout
    batch_size: int
    figures: Figures
    epochs: int

    @property
    def configurations(self) -> list[str]:
        """The names that the hub shows: ``default``, all epochs in order, and each one where there are several."""
        epochs = [f"epoch-{epoch:05d}" for epoch in range(self.epochs)]
        return ["default", *(epochs if self.epochs > 1 else ())]

    @property
    def negatives(self) -> int:
        """Hard negatives of an example, on average, rounded down."""
        return self.figures.counts["hard negatives"] // max(1, self.figures.counts["examples"])


class BatchFormat(ABC):
    """One tool's files. ``layouts`` are the ones it can hold. ``ending`` is of its files' names."""

    layouts: tuple[Layout, ...] = ("pairs",)
    ending = "parquet"

    @abstractmethod
    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one file of consecutive batches of an epoch, in order; one batch is in memory."""

    @abstractmethod
    def columns(self) -> list[Column]:
        """The columns, or keys, of the files."""

    @abstractmethod
    def usage(self, published: Published) -> str:
        """Markdown: how the tool reads the files in order, and what it can't express."""


def epoch_folder(epoch: int) -> str:
    """Folder of an epoch's files."""
    return f"data/epoch-{epoch:05d}"


def masks_left_out(published: Published, tool: str, instead: str) -> str:
    """A paragraph on the masks that the format has no place for; '' where nothing was masked."""
    counts = published.figures.counts
    masked = counts["masked negatives"]
    if not masked:
        return ""
    return (
        f"\n{tool} has no place for masks: {masked:,} negatives that the batches mask as false"
        f" ({masked / counts['negatives']:.2%}) are trained on as negatives here. No example was left out for"
        f" it. {instead}\n"
    )


SHUFFLING = """Its trainer shuffles examples. With transformers 5, `--train_sampling_strategy sequential` keeps the
order, so that every step sees a stored batch; with transformers 4, override `_get_train_sampler` of the trainer with
one that returns `torch.utils.data.SequentialSampler(self.train_dataset)`. On several processes each takes whole
batches in turn. `--num_train_epochs 1` passes once through the files that are named.
"""
MASKS_KEPT_IN = "Raytriever trains on the masks, and the format hugging_face keeps them."


class JsonLines(BatchFormat):
    """A file of lines a stretch of batches."""

    ending = "jsonl"

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes the examples one after the other."""
        write_json_lines(path, (self.record(row) for batch in batches for row in batch.rows.to_pylist()))

    @abstractmethod
    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """The record of one example of layout ``pairs``."""


_PLACE = schema_of(epoch=pa.int32(), batch=pa.int32())
_MEANINGS = {
    "epoch": "number of the epoch",
    "batch": "number of the batch in its epoch; its rows stand together, in order",
}


class HuggingFace(BatchFormat):
    """``data/epoch-<n>/batches-<n>.parquet`` with the columns of the batches, and ``epoch`` and ``batch``."""

    layouts = ("pairs", "chunks", "candidates")

    def __init__(self, layout: Layout, schema: pa.Schema) -> None:
        self._layout: Layout = layout
        self._schema = pa.schema([*_PLACE, *schema])

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch."""
        with pq.ParquetWriter(path, self._schema, compression="zstd", write_page_index=True) as file:
            for epoch, number, rows in batches:
                columns = {"epoch": [epoch] * len(rows), "batch": [number] * len(rows)}
                columns |= {name: rows[name] for name in rows.column_names}
                file.write_table(pa.table(columns, self._schema))

    def columns(self) -> list[Column]:
        """The batches', after the example's place."""
        meanings = _MEANINGS | {column.name: column.meaning for column in LAYOUTS[self._layout].columns}
        return [
            Column(
                field.name,
                f"list of {field.type.value_type}" if pa.types.is_list(field.type) else str(field.type),
                meanings[field.name],
            )
            for field in self._schema
        ]

    def usage(self, published: Published) -> str:
        """``datasets`` for all rows, a row group for one batch."""
        size = published.batch_size
        return f"""Rows are in training order: the next {size} rows are the next batch.

```python
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="train")  # or its name on the hub
batch = rows[{size} * 3 : {size} * 4]  # the fourth batch
```

One batch alone is one row group, one read:

```python
import pyarrow.parquet

file = pyarrow.parquet.ParquetFile("data/epoch-00000/batches-00000.parquet")
batch = file.read_row_group(3)
```

Don't shuffle rows: which examples share a batch is what these data are for. Shuffle batches, if anything; `batch` is
a batch's number among the stored ones.
"""
