"""What a step of CODER takes, and how much of it waits for documents, by the size of the collection.

    python -m benchmarks.coder_steps --documents 10000 100000 1000000 --steps 12

MiniLM on batches of 32 queries with 1,000 candidates each, drawn at random from a memory-mapped store as wide as its
vectors. The collections are taken in turns; medians over the steps but the first of each.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.made_up_artifacts import make_vectors
from raytriever.artifacts.artifact import Derivation
from raytriever.artifacts.writer import ArtifactWriter
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from retrieval.encoders.towers import Towers
from trainers.engine.callback import Callback
from trainers.engine.loop import train
from trainers.engine.settings import TrainingSettings
from trainers.objectives.coder.objective import Coder
from trainers.objectives.coder.settings import CoderSettings

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
QUERIES, CANDIDATES, DIMENSION, ROWS_PER_SHARD = 32, 1_000, 384, 16_384
WORDS = ["vitamin", "cancer", "risk", "heart", "disease", "diet", "fish", "protein", "women", "blood", "pressure"]


class Lists:
    """Batches of random lists over so many documents."""

    uri, fingerprint = "benchmark", "0" * 64

    def __init__(self, documents: int, count: int) -> None:
        self._documents, self._count = documents, count

    def number_of_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Batches of the one epoch."""
        return self._count

    def stored_bytes(self, epoch: int, index: int) -> int:  # noqa: ARG002
        """All the same."""
        return 1

    def read(self, epoch: int, index: int) -> pa.Table:  # noqa: ARG002
        """One batch; the first document of each list is its positive."""
        generator = np.random.default_rng(index)
        rows = generator.integers(self._documents, size=(QUERIES, CANDIDATES))
        queries = [" ".join(generator.choice(WORDS, size=8)) for _ in range(QUERIES)]
        grades = pa.array([[1, *[None] * (CANDIDATES - 1)]] * QUERIES, pa.list_(pa.int32()))
        ids = [f"{index}-{place}" for place in range(QUERIES)]
        return pa.table(
            {"query_id": ids, "query": queries, "candidate_rows": rows.tolist(), "candidate_relevance": grades}
        )


def blocks(documents: int) -> Iterator[NDArray[np.float32]]:
    """Random vectors, a shard at a time."""
    for start in range(0, documents, ROWS_PER_SHARD):
        shape = (min(ROWS_PER_SHARD, documents - start), DIMENSION)
        yield np.random.default_rng(start).standard_normal(shape, dtype=np.float32)


class Points(Callback):
    """Collects the points of steps."""

    def __init__(self) -> None:
        self.found: list[Mapping[str, Any]] = []

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Notes it."""
        self.found.append(point)


def points_of(vectors: str, documents: int, steps: int) -> list[Mapping[str, Any]]:
    """The steps of one short run."""
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint)
    settings = CoderSettings(documents=vectors, other_encoder=True, temperature=0.05)
    objective = Coder.build(settings, Towers(encoder, encoder))
    points = Points()
    train(objective, Lists(documents, steps), TrainingSettings(bf16=False), callbacks=[points])
    return points.found[1:]


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        collection = ArtifactWriter(f"{folder}/collection", Derivation("collection", "made up", 1, {}, {}))
        collection.begin()
        artifact = collection.finish([], {}, {})
        stores = {
            count: make_vectors(Path(folder) / str(count), artifact, {"documents": blocks(count)})
            for count in options.documents
        }
        reports: dict[int, list[Mapping[str, Any]]] = {count: [] for count in stores}
        for _ in range(options.rounds):
            for count, vectors in stores.items():
                reports[count] += points_of(vectors, count, options.steps)
    for count, measured in reports.items():
        seconds, waiting = (np.array([point[name] for point in measured]) for name in ("seconds", "waiting_seconds"))
        share = waiting.sum() / seconds.sum()
        print(f"{count:>10,} documents: {1000 * np.median(seconds):7.0f} ms a step, {share:.1%} of it waiting for data")


if __name__ == "__main__":
    main()
