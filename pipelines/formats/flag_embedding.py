"""Training sets in FlagEmbedding's form (the BGE models): JSON lines with a query and lists of texts."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.batch_formats import MASKS_KEPT_IN, SHUFFLING, Column, JsonLines, Published, masks_left_out
from pipelines.formats.training_examples import (
    HARD_NEGATIVE,
    POSITIVE,
    Example,
    ExampleFormat,
    TrainingExamples,
    split_files,
    text_of,
    texts_example,
    write_json_lines,
)
from raytriever.artifacts.storage import Folder
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import FolderSource, Record
from retrieval.collections.text_lines import FileNames, plain_name


class FlagEmbedding(FolderSource):
    """Settings: the files of each split below a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``.
    """

    kind: Literal["flag_embedding"] = "flag_embedding"
    """The format."""
    examples: dict[str, FileNames] = Field(min_length=1)
    """Each split's file or files."""
    domain: Literal["", "file", "type", "prompt"] = ""
    """Domain of an example: its file's name without endings, or what is under that key."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(FlagEmbeddingFormat(self), self)


class FlagEmbeddingFormat(ExampleFormat):
    """Reads {"query", "pos": […], "neg": […]}: texts of ``pos`` have relevance 1, those of ``neg`` 0.

    A text's id is made from the text and its domain: one that occurs in two domains is a document of each. Not kept:
    ``pos_scores`` and ``neg_scores``, a teacher's and no judgments; ``prompt``, unless it is the domain.
    """

    def __init__(self, config: FlagEmbedding) -> None:
        folder = Folder(config.path)
        super().__init__(folder, split_files(folder, config.examples, "examples"))
        self._domain = config.domain

    def example(self, record: Record, split: str, name: str) -> Example:
        """The query with its texts."""
        if self._domain == "file":
            domain = plain_name(name).rpartition("/")[2].rpartition(".")[0]
        else:
            domain = record.text(self._domain) if self._domain else ""
        query = record.string("query")
        record.required("pos")
        relevance_of = {"pos": POSITIVE, "neg": HARD_NEGATIVE}
        texts = [(text, relevance) for key, relevance in relevance_of.items() for text in record.strings(key)]
        return texts_example(record, query, texts, domain, split)


def write(examples: TrainingExamples, folder: Path) -> list[str]:
    """Writes ``<split>.jsonl``, lines of {"query", "pos": […], "neg": […]}; returns its name.

    A document is its title and text in one string. ``neg`` are the judgments of 0, or what was mined in their
    place; it may be empty, but FlagEmbedding trains on examples with at least one.
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
