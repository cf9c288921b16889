"""Training examples in DPR's form (Karpukhin et al. 2020)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.exports.training_examples import Document, TrainingExamples


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Writes ``<split>.json``, a list with one example a line; returns its name.

    ``positive_ctxs`` are the positives, the highest grade first, as DPR trains on the first; ``hard_negative_ctxs``
    the judgments of 0, or ``hard_negatives`` in their place; ``negative_ctxs`` judgments below 0. A passage keeps its
    id, as ``passage_id``; a question has none. Raises what ``TrainingExamples`` does.
    """
    name = f"{split}.json"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
        opening = "[\n"
        for example in examples:
            record = {
                "question": example.query,
                "answers": example.answers,
                "positive_ctxs": list(map(_passage, example.positives)),
                "negative_ctxs": list(map(_passage, example.other_negatives)),
                "hard_negative_ctxs": list(map(_passage, example.hard_negatives)),
            }
            file.write(opening + json.dumps(record, ensure_ascii=False))
            opening = ",\n"
        file.write("\n]\n")
    return [name]


def _passage(document: Document) -> dict[str, str]:
    return {"title": document["title"], "text": document["text"], "passage_id": document["id"]}
