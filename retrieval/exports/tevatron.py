"""Training examples in Tevatron's form, and the corpus that it encodes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.exports.rows import rows
from raytriever.retrieval.exports.training_examples import Document, TrainingExamples

_CORPUS = "corpus.jsonl"


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Writes ``<split>.jsonl`` and ``corpus.jsonl``; returns their names.

    Examples are in the form with passages written out, which every version reads, the newest too: in the other one,
    with ids, training leaves titles out that encoding takes. ``negative_passages`` are the judgments of 0, or
    ``hard_negatives`` in their place. The corpus holds all documents. Raises what ``TrainingExamples`` does.
    """
    name = f"{split}.jsonl"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
        for example in examples:
            record = training_record(example.query_id, example.query, example.positives, example.hard_negatives)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    with (folder / _CORPUS).open("w", encoding="utf-8", newline="\n") as file:
        for id_, title, text in rows(collection, "documents", "id", "title", "text"):
            file.write(json.dumps({"docid": id_, "title": title, "text": text}, ensure_ascii=False) + "\n")
    return [name, _CORPUS]


def training_record(
    query_id: str, query: str, positives: Sequence[Document], negatives: Sequence[Document]
) -> dict[str, Any]:
    """One example, its passages written out."""
    return {
        "query_id": query_id,
        "query": query,
        "positive_passages": list(map(_passage, positives)),
        "negative_passages": list(map(_passage, negatives)),
    }


def _passage(document: Document) -> dict[str, str]:
    return {"docid": document["id"], "title": document["title"], "text": document["text"]}
