"""Batches as lines of JSON, an example a line in batch order: what Tevatron and FlagEmbedding train on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.batches import Layout
from pipelines.formats import flag_embedding, tevatron
from pipelines.formats.batch_formats import Batch, Column, Published, data_files, masks_left_out

_SHUFFLING = """Its trainer shuffles examples. With transformers 5, `--train_sampling_strategy sequential` keeps the
order, so that every step sees a stored batch; with transformers 4, override `_get_train_sampler` of the trainer with
one that returns `torch.utils.data.SequentialSampler(self.train_dataset)`. On several processes each takes whole
batches in turn. `--num_train_epochs 1` passes once through the files that are named.
"""
_INSTEAD = "Raytriever trains on the masks, and the format hugging_face keeps them."


class JsonLines(ABC):
    """A file of lines a stretch of batches."""

    layouts: tuple[Layout, ...] = ("pairs",)
    ending = "jsonl"

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes the examples one after the other."""
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for batch in batches:
                for row in batch.rows.to_pylist():
                    file.write(json.dumps(self.record(row), ensure_ascii=False) + "\n")

    @abstractmethod
    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is written of one example of layout ``pairs``."""

    def front_matter(self, published: Published) -> dict[str, Any]:
        """Configurations of the files."""
        return {"configs": data_files(published, self.ending)}


class Tevatron(JsonLines):
    """Examples with their passages written out, which every version of Tevatron reads."""

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """A document's title is in its text already."""
        negatives = zip(row["hard_negative_ids"], row["hard_negatives"], strict=True)
        return tevatron.training_record(
            row["query_id"],
            row["query"],
            [{"id": row["document_id"], "title": "", "text": row["document"]}],
            [{"id": id_, "title": "", "text": text} for id_, text in negatives],
        )

    def columns(self, layout: Layout) -> list[Column]:  # noqa: ARG002
        """The keys of a line."""
        return [
            Column("query_id", "string", "id of the query"),
            Column("query", "string", "text of the query"),
            Column("positive_passages", "list of objects", "docid, title (empty), text of the document"),
            Column("negative_passages", "list of objects", "the same of the hard negatives"),
        ]

    def usage(self, published: Published) -> str:
        """Tevatron's arguments."""
        size, group = published.batch_size, 1 + published.negatives
        return f"""The next {size} lines are the next batch.

```
python -m tevatron.retriever.driver.train --dataset_name json --dataset_path 'data/epoch-*/batches-*.jsonl' \\
  --per_device_train_batch_size {size} --train_group_size {group} --num_train_epochs 1 …
```

`--train_group_size` is 1 and the hard negatives of an example that take part. {_SHUFFLING}""" + masks_left_out(
            published, "Tevatron", _INSTEAD
        )


class FlagEmbedding(JsonLines):
    """Lines of query, pos, neg."""

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """Texts alone."""
        return flag_embedding.training_record(row["query"], [row["document"]], row["hard_negatives"])

    def columns(self, layout: Layout) -> list[Column]:  # noqa: ARG002
        """The keys of a line."""
        return [
            Column("query", "string", "text of the query"),
            Column("pos", "list of strings", "text of the document that answers it"),
            Column("neg", "list of strings", "texts of its hard negatives"),
        ]

    def usage(self, published: Published) -> str:
        """FlagEmbedding's arguments, and what it needs of every example."""
        size, without = published.batch_size, published.figures.counts["examples without a hard negative"]
        group = max(2, 1 + published.negatives)
        warning = (
            f"\nFlagEmbedding needs a negative of every example; {without:,} here have none. Mine some and make the"
            " batches again, or train with another tool.\n"
            if without
            else ""
        )
        return f"""The next {size} lines are the next batch.

```
torchrun -m FlagEmbedding.finetune.embedder.encoder_only.base --train_data data/epoch-*/batches-*.jsonl \\
  --per_device_train_batch_size {size} --train_group_size {group} --same_dataset_within_batch False \\
  --num_train_epochs 1 …
```

{_SHUFFLING}{warning}""" + masks_left_out(published, "FlagEmbedding", _INSTEAD)
