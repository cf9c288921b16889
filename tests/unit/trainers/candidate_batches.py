"""Batches of candidate lists over tiny stored vectors, and CODER on them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from retrieval.vectors import StoredVectors
from tests.unit.batch_tables import batch_table
from tests.unit.pipelines.jobs.batch_inputs import artifact
from tests.unit.trainers.tiny import TinyEncoder, random_text
from trainers.objectives.coder.objective import Coder
from trainers.objectives.coder.settings import CoderSettings

DOCUMENTS, DIMENSION = 40, 6  # as wide as TinyEncoder's vectors
FILES = (7, 1, 20, 12)  # documents of each


def document_values() -> np.ndarray:
    """float16 (40, 6)."""
    return np.random.default_rng(1).normal(size=(DOCUMENTS, DIMENSION)).astype(np.float16)


def store_vectors(
    folder: Path, values: np.ndarray | None = None, files: tuple[int, ...] = FILES, queries: Sequence[str] = ()
) -> StoredVectors:
    """The documents' vectors in several files, and random ones of these queries."""
    values = document_values() if values is None else values
    contract = {
        "model": "base", "pooling": "mean", "normalize": False, "query_prompt": "", "document_prompt": "",
        "max_length": 16, "dtype": "float32", "dimension": values.shape[-1],
    }  # fmt: skip
    shards, start = [], 0
    for number, count in enumerate(files):
        rows = range(start, start + count)
        name = f"documents/{number:05d}"
        ids = pa.table({"id": [f"d{row}" for row in rows]})
        shards.append(
            {"files": {f"{name}.npy": values[start : start + count], f"{name}.ids.parquet": ids}, "rows": count}
        )
        start += count
    if queries:
        drawn = np.random.default_rng(2).normal(size=(len(queries), values.shape[-1])).astype(np.float16)
        shards[-1]["files"] |= {
            "queries/00000.npy": drawn,
            "queries/00000.ids.parquet": pa.table({"id": list(queries)}),
        }
    shards[0]["of_all"] = {"encoder": contract}
    return StoredVectors(artifact(folder, "vectors", {}, {"collection": "c" * 64}, shards))


def candidate_batch(seed: int = 0, size: int = 4, longest: int = 9) -> pa.Table:
    """Lists of 3 to ``longest`` documents with a positive or more, by grades 0 to 3 and none; the third has none."""
    generator = np.random.default_rng(seed)
    rows = []
    for place in range(size):
        count = int(generator.integers(3, longest + 1))
        grades = [None if generator.random() < 0.6 else int(generator.integers(4)) for _ in range(count)]
        grades[int(generator.integers(count))] = 2
        rows.append(
            {
                "query_id": f"q{seed}-{place}",
                "query": random_text(generator),
                "candidate_rows": generator.choice(DOCUMENTS, count, replace=False).tolist(),
                "candidate_relevance": [None] * count if place == 2 else grades,
            }
        )
    table = batch_table("candidates", rows).select(list(rows[0]))
    return table.append_column("epoch", pa.array([0] * size, pa.int32()))


def tiny_coder(vectors: StoredVectors, **settings: object) -> Coder:
    """In float64."""
    torch.manual_seed(3)
    return Coder(TinyEncoder().double(), CoderSettings(documents=vectors.uri, **settings), vectors)
