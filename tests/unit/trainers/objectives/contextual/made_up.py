"""A contextual objective around a tiny encoder, and a batch that it reads."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from trainers.objectives.contextual import Contextual, contextual_encoder
from trainers.objectives.pair_settings import ContextualSettings

FUNCTIONS = [
    ("open a file for reading", "def open(path):\n    return io.open(path, 'r')"),
    ("sort a list", "def sort(items):\n    return sorted(items)"),
    ("the length of a string", "def length(string):\n    return len(string)"),
    ("close it", "def close(self):\n    self.file.close()"),
    ("all keys", "def keys(mapping):\n    return list(mapping)"),
    ("write a line and flush", "def write(file, line):\n    file.write(line)\n    file.flush()"),
    ("close it", "def close(self):\n    self.closed = True"),  # a query with two answers
    ("sort the items", "def sort(items):\n    return sorted(items)"),  # a document of two queries
]


def rows_of(count: int = len(FUNCTIONS), epoch: int = 0) -> pa.Table:
    """A batch of ``count`` pairs, some with hard negatives, as the loop hands it over."""
    hard_negatives = [["pass"], [], ["x = 1", "y"], ["return None"], [], ["raise ValueError(x)"], [], []]
    masked = [[], [7], [], [6], [], [], [3], [1]]
    return pa.table(
        {
            "query": [query for query, _ in FUNCTIONS[:count]],
            "document": [document for _, document in FUNCTIONS[:count]],
            "hard_negatives": pa.array(hard_negatives[:count], pa.list_(pa.string())),
            "masked": pa.array([[c for c in row if c < count] for row in masked[:count]], pa.list_(pa.int32())),
            "batch": pa.array([0] * count, pa.int32()),
            "epoch": pa.array([epoch] * count, pa.int32()),
        }
    )


def objective_of(folder: Path, encoder: dict[str, Any] | None = None, **settings: Any) -> Contextual:
    """Without dropout in its layers, its weights always the same."""
    chosen = ContextualSettings.model_validate(settings)
    values = {"model": str(folder), "pooling": "mean", "normalize": True} | (encoder or {})
    towers = load_towers(EncoderSettings.model_validate(values), folder, "f" * 64, dropout=0.0)
    return Contextual(contextual_encoder(towers.query, chosen, None, seed=0), chosen).train()
