"""Stored batches of pairs whose rows a test spells out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.batches import LAYOUTS, BatchWriter
from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from tests.unit.batch_tables import batch_table


def pair(number: int, hard_negatives: Sequence[str] = (), masked: Sequence[int] = (), query: str = "q") -> dict:
    """A row; its query's id is ``query`` and the number."""
    return {
        "query_id": f"{query}{number}",
        "query": f"import {number} path",
        "document_id": f"d{number}",
        "document": f"def return {number}",
        "hard_negative_ids": [f"h{number}-{place}" for place in range(len(hard_negatives))],
        "hard_negatives": list(hard_negatives),
        "masked": list(masked),
        "domain": "any",
        "cluster": 0,
    }


def store_pairs(folder: Path, batches: Sequence[Sequence[dict[str, Any]]], inputs: dict[str, str] | None = None) -> str:
    """An artifact of one epoch of ``batches`` of equally many rows, made from ``inputs``; its URI."""
    return store_epochs(folder, [batches], inputs, {"name": folder.name})


def store_epochs(
    folder: Path,
    epochs: Sequence[Sequence[Sequence[dict[str, Any]]]],
    inputs: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> str:
    """The same of several epochs, whose batches have the columns of these ``facts`` too."""
    facts = {"layout": "pairs"} | (facts or {})
    writer = ArtifactWriter(str(folder), Derivation("batches", "made up", 1, config or {}, inputs or {}))
    writer.begin()
    records = []
    with writer.folder.scratch() as scratch:
        for epoch, batches in enumerate(epochs):
            shard = ShardWriter(writer.folder, f"{epoch}", scratch)
            with BatchWriter(shard, LAYOUTS["pairs"].schema(facts), epoch, 0, len(batches[0])) as file:
                for rows in batches:
                    file.write(batch_table("pairs", rows, facts))
            records.append(file.commit())
    return writer.finish(records, facts, {}).uri
