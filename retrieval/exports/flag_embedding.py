"""Training examples in FlagEmbedding's form (the BGE models)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raytriever.retrieval.collections.collection import passage_text
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.exports.training_examples import Document, TrainingExamples


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Writes ``<split>.jsonl``, lines of {"query", "pos": […], "neg": […]}; returns its name.

    A document is its title and text in one string. ``neg`` are the judgments of 0, or ``hard_negatives`` in their
    place; it may be empty, but FlagEmbedding trains on examples with at least one. Raises what ``TrainingExamples``
    does.
    """
    name = f"{split}.jsonl"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
        for example in examples:
            positives, negatives = map(_text, example.positives), map(_text, example.hard_negatives)
            record = training_record(example.query, list(positives), list(negatives))
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return [name]


def training_record(query: str, positives: list[str], negatives: list[str]) -> dict[str, Any]:
    """One example."""
    return {"query": query, "pos": positives, "neg": negatives}


def _text(document: Document) -> str:
    return passage_text(document["title"], document["text"])
