"""Stored batches of triplets: one hard negative a row, with teacher scores."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

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

    def __init__(self, counts: Sequence[int] = (9, 8), size: int = 6, fingerprint: str = "b" * 64) -> None:
        super().__init__(counts, size, fingerprint)

    def read(self, epoch: int, index: int) -> pa.Table:
        self.reads.append((epoch, index))
        return triplet_batch(1000 * epoch + index, self.size)
