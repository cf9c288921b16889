"""Training examples and batches in FlagEmbedding's format (the BGE models): JSON lines with a query and lists of texts.

Kind ``columns`` reads them, with ``document: pos`` and ``negatives: [neg]`` in ``pairs``.
"""

from pathlib import Path
from typing import Any

from pipelines.formats.batch_formats import MASKS_KEPT_IN, SHUFFLING, Column, JsonLines, Published, masks_left_out
from pipelines.formats.training_examples import TrainingExamples, text_of, write_json_lines


def write(examples: TrainingExamples, folder: Path) -> list[str]:
    """Writes ``<split>.jsonl``, lines of {"query", "pos": […], "neg": […]}; returns its name.

    A document is its title and text in one string. ``neg`` are the judgments of 0, or mined ones instead. It may be
    empty, but FlagEmbedding trains only on examples with at least one.
    """
    name = f"{examples.split}.jsonl"
    records = (
        _line(example.query, [*map(text_of, example.positives)], [*map(text_of, example.hard_negatives)])
        for example in examples
    )
    write_json_lines(folder / name, records)
    return [name]


def _line(query: str, positives: list[str], negatives: list[str]) -> dict[str, Any]:
    return {"query": query, "pos": positives, "neg": negatives}


class BatchLines(JsonLines):
    """Batches as lines of query, pos, neg."""

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """Texts alone."""
        return _line(row["query"], [row["document"]], row["hard_negatives"])

    def columns(self) -> list[Column]:
        """The keys of a line."""
        return [
            Column("query", "string", "text of the query"),
            Column("pos", "list of strings", "text of the document that answers it"),
            Column("neg", "list of strings", "texts of its hard negatives"),
        ]

    def usage(self, published: Published) -> str:
        """FlagEmbedding's arguments, and what it needs of every example."""
        size, without = published.batch_size, published.figures.counts["examples without a hard negative"]
        group = 1 if without else 1 + published.negatives
        warning = (
            f"\n{without:,} examples have no hard negative, and FlagEmbedding can draw none for them: with"
            " `--train_group_size 1` it trains on the other documents of the batch alone.\n"
            if without
            else ""
        )
        return f"""The next {size} lines are the next batch.

```
torchrun -m FlagEmbedding.finetune.embedder.encoder_only.base --train_data data/epoch-*/batches-*.jsonl \\
  --per_device_train_batch_size {size} --train_group_size {group} --same_dataset_within_batch False \\
  --num_train_epochs 1 …
```

{SHUFFLING}{warning}""" + masks_left_out(published, "FlagEmbedding", MASKS_KEPT_IN)
