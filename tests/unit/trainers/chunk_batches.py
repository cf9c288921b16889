"""Batches of chunks as `raytriever group` stores them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.unit.batch_tables import batch_table
from tests.unit.pipelines.jobs.batch_inputs import artifact
from tests.unit.retrieval.encoders.tiny_models import SENTENCES
from tests.unit.trainers.tiny import with_columns

WORDS = " ".join(SENTENCES).split()


def chunk_rows(number: int, size: int) -> list[dict[str, Any]]:
    """One batch: chunks of two sources, the first of prose, the second of code, in turn."""
    generator = np.random.default_rng(number)
    return [
        {
            "document_id": f"{number}-{place}",
            "document": " ".join(generator.choice(WORDS, int(generator.integers(3, 9)))),
            "source_id": f"{number}-source-{place % 2}",
            "number": place // 2,
            "domain": ("prose", "code")[place % 2],
        }
        for place in range(size)
    ]


def chunk_table(number: int = 0, size: int = 4) -> pa.Table:
    """One batch with the columns that training adds."""
    table = batch_table("chunks", chunk_rows(number, size))
    return with_columns(table, batch=np.full(size, number, np.int32), epoch=np.zeros(size, np.int32))


def store_chunk_batches(folder: Path, files: tuple[int, ...] = (2, 1), size: int = 4, epochs: int = 1) -> str:
    """The URI of an artifact with so many batches in each file of an epoch."""
    shards, number = [], 0
    for epoch in range(epochs):
        for part, count in enumerate(files):
            rows = [row for batch in range(number, number + count) for row in chunk_rows(batch, size)]
            number += count
            name = f"epoch={epoch:05d}/batches-{part:05d}.parquet"
            table = batch_table("chunks", rows)
            facts = {"epoch": epoch, "batches": count, "batch_size": size}
            shards.append({"files": {name: table}, "rows": len(rows), "facts": facts, "row_group_size": size})
    shards[0]["of_all"] = {"layout": "chunks"}
    return artifact(folder, "batches", {}, {}, shards)
