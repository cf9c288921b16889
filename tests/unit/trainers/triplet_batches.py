"""Stored batches of triplets: one hard negative a row, with teacher scores."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.unit.trainers.pair_batches import store_epochs
from tests.unit.trainers.tiny import TinyBatches, random_text


def triplet_batch(seed: int, size: int = 6) -> pa.Table:
    """The last document is the first one's, and a negative is another row's document."""
    generator = np.random.default_rng(seed)
    documents, negatives = ([random_text(generator) for _ in range(size)] for _ in range(2))
    documents[-1], negatives[0] = documents[0], documents[1]
    return pa.table(
        {
            "query_id": [f"q{seed}-{row}" for row in range(size)],
            "query": [random_text(generator) for _ in range(size)],
            "document": documents,
            "hard_negative_ids": [[f"n{text}"] for text in negatives],
            "hard_negatives": [[text] for text in negatives],
            "masked": pa.array([[]] * size, pa.list_(pa.int32())),
            "positive_score": pa.array(generator.normal(5, 2, size), pa.float32()),
            "hard_negative_scores": pa.array(
                [[score] for score in generator.normal(0, 2, size)], pa.list_(pa.float32())
            ),
        }
    )


class TripletBatches(TinyBatches):
    """``TinyBatches`` of triplets."""

    def __init__(self) -> None:
        super().__init__(fingerprint="b" * 64, make=triplet_batch)


def store_triplets(folder: Path, doubled: Collection[tuple[int, int]], counts: Sequence[int] = (4, 4)) -> str:
    """An artifact of batches of four triplets, so many an epoch; its URI.

    ``doubled``: (epoch, number) of those whose rows have two hard negatives, which no triplet has.
    """
    epochs = []
    for epoch, count in enumerate(counts):
        epochs.append([triplet_batch(1000 * epoch + number, 4).to_pylist() for number in range(count)])
        for number, rows in enumerate(epochs[-1]):
            for row, made in enumerate(rows):
                made |= {"document_id": f"d{number}-{row}", "domain": "any", "cluster": 0}
                if (epoch, number) in doubled:
                    made |= {name: made[name] * 2 for name in ("hard_negative_ids", "hard_negatives")}
    return store_epochs(folder, epochs)
