"""Assembling a batch of candidates for CODER, against copying it row by row.

    python -m benchmarks.candidate_gather --documents 200000 --rounds 7

A batch of 32 lists of 1,000 documents of 768 numbers, each list drawn at random from the collection. Ours reads a
memory-mapped float16 store, as ``raytriever embed`` writes it, in the reading thread: the distinct documents into one
buffer, and where each candidate is in it. The other side is what the released code of the CODER paper does: a float32
memory map, of which each query's rows are read by NumPy, put into a padded float32 array of zeros and copied into a
tensor. Both sides run in turns on the same lists, the page cache warm; medians and their ratio are printed. ``float32``
adds turning ours into float32, which training leaves to the device.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.made_up_artifacts import make_vectors
from raytriever.artifacts.artifact import Derivation
from raytriever.artifacts.writer import ArtifactWriter
from retrieval.vectors import StoredVectors
from trainers.objectives.coder.candidates import DocumentVectors

LISTS, LENGTH, DIMENSION = 32, 1_000, 768


def blocks(documents: int, rows_per_shard: int) -> Iterator[NDArray[np.float32]]:
    """Random vectors, a shard at a time."""
    for start in range(0, documents, rows_per_shard):
        shape = (min(rows_per_shard, documents - start), DIMENSION)
        yield np.random.default_rng(start).standard_normal(shape, dtype=np.float32)


def row_by_row(store: NDArray[np.float32], lists: NDArray[np.int64]) -> torch.Tensor:
    """float32 (lists, longest, d): each list gathered, padded, copied."""
    longest = max(len(rows) for rows in lists)
    result = torch.zeros(len(lists), longest, store.shape[1], dtype=torch.float32)
    for place, rows in enumerate(lists):
        vectors = np.zeros((longest, store.shape[1]), dtype=np.float32)
        vectors[: len(rows)] = store[rows]
        result[place] = torch.tensor(vectors, dtype=torch.float32)
    return result


def seconds(function: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Prints medians in milliseconds and the ratio of the two sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--rows-per-shard", type=int, default=16_384, help="as embed writes them on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        collection = ArtifactWriter(f"{folder}/collection", Derivation("collection", "made up", 1, {}, {}))
        collection.begin()
        artifact = collection.finish([], {}, {})
        stored = make_vectors(place, artifact, {"documents": blocks(options.documents, options.rows_per_shard)})
        ours = DocumentVectors(StoredVectors(stored))
        theirs = np.memmap(place / "vectors.f32", np.float32, "w+", shape=(options.documents, DIMENSION))
        everything = np.arange(options.documents)
        for rows in np.array_split(everything, -(-options.documents // options.rows_per_shard)):
            theirs[rows] = ours.gather(torch.from_numpy(rows))[:-1].numpy()
        measure(ours, theirs, options.documents, options.rounds)


def measure(ours: DocumentVectors, theirs: NDArray[np.float32], documents: int, rounds: int) -> None:
    """Both sides in turns; the first round warms the page cache up and doesn't count."""
    times: dict[str, list[float]] = {"row by row, float32": [], "ours, float16": [], "ours, float32": []}
    for number in range(rounds + 1):
        drawn = np.random.default_rng(number).integers(documents, size=(LISTS, LENGTH))
        lists = torch.from_numpy(drawn)

        def assembled() -> torch.Tensor:
            return ours.gather(ours.pool(lists).rows)  # noqa: B023

        sides = {
            "row by row, float32": lambda: row_by_row(theirs, drawn),  # noqa: B023
            "ours, float16": assembled,
            "ours, float32": lambda: assembled().float(),
        }
        pool = ours.pool(lists)
        assert torch.equal(assembled().float()[pool.places], row_by_row(theirs, drawn))
        for name, side in sides.items():
            taken = seconds(side)
            if number:
                times[name].append(taken)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:20} {1000 * median:8.1f} ms, {medians['row by row, float32'] / median:5.1f} x")


if __name__ == "__main__":
    main()
