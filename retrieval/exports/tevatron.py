"""Training examples in Tevatron's form, and the corpus that it encodes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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
            record = {
                "query_id": example.query_id,
                "query": example.query,
                "positive_passages": list(map(_passage, example.positives)),
                "negative_passages": list(map(_passage, example.hard_negatives)),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    with (folder / _CORPUS).open("w", encoding="utf-8", newline="\n") as file:
        for id_, title, text in rows(collection, "documents", "id", "title", "text"):
            file.write(json.dumps({"docid": id_, "title": title, "text": text}, ensure_ascii=False) + "\n")
    return [name, _CORPUS]


def _passage(document: Document) -> dict[str, str]:
    return {"docid": document["id"], "title": document["title"], "text": document["text"]}
