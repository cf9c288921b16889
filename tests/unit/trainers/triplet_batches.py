"""Stored batches of triplets: one hard negative a row, with teacher scores."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.batches import LAYOUTS, BatchWriter
from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from tests.unit.batch_tables import batch_table
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


def store_triplets(folder: Path, doubled: Collection[tuple[int, int]], counts: Sequence[int] = (4, 4)) -> str:
    """An artifact of batches of four triplets, so many an epoch; its URI.

    ``doubled``: (epoch, number) of those whose rows have two hard negatives, which no triplet has.
    """
    size = 4
    writer = ArtifactWriter(str(folder), Derivation("batches", "made up", 1, {}, {}))
    writer.begin()
    records = []
    with writer.folder.scratch() as scratch:
        for epoch, count in enumerate(counts):
            shard = ShardWriter(writer.folder, f"{epoch}", scratch)
            with BatchWriter(shard, LAYOUTS["pairs"].schema(), epoch, 0, size) as file:
                for number in range(count):
                    rows = triplet_batch(1000 * epoch + number, size).to_pylist()
                    for row, made in enumerate(rows):
                        made |= {"document_id": f"d{number}-{row}", "domain": "any", "cluster": 0}
                        if (epoch, number) in doubled:
                            made |= {name: made[name] * 2 for name in ("hard_negative_ids", "hard_negatives")}
                    file.write(batch_table("pairs", rows))
            records.append(file.commit())
    return writer.finish(records, {"layout": "pairs"}, {}).uri
