"""What it costs to know that an artifact is whole: ``python -m benchmarks.integrity --gigabytes 10``.

Beside a plain read of the same files: their check by size and time of change, as every reuse makes it; the check of a
copy, whose files are all hashed once; and ``raytriever verify``, which always reads every byte.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raytriever.artifacts.artifact import CHECKED, Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter

_FILE_BYTES = 64 << 20


def make(folder: Path, files: int) -> Artifact:
    """An artifact of so many files of random bytes."""
    writer = ArtifactWriter(str(folder), Derivation("made up", "made up", 1, {"files": files}, {}))
    with writer.making(), writer.folder.scratch() as scratch:
        records = []
        for number in range(files):
            shard = ShardWriter(writer.folder, f"{number:05d}", scratch, writer.derivation.digest)
            generator = np.random.default_rng(number)
            shard.path(f"{number:05d}.bin").write_bytes(generator.bytes(_FILE_BYTES))
            shard.add(f"{number:05d}.bin")
            records.append(shard.commit(1))
        return writer.finish(records, {}, {})


def seconds(act: Callable[[], object]) -> float:
    """By the clock."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def read(artifact: Artifact) -> None:
    """Reads every byte and does nothing with it."""
    for name in artifact.names():
        with (Path(artifact.uri) / name).open("rb") as file:
            while file.read(8 << 20):
                pass


def main() -> None:
    """Prints each cost in seconds and as a ratio to the plain read beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        artifact = make(folder / "made", max(1, round(options.gigabytes * 1e9 / _FILE_BYTES)))
        plain = seconds(lambda: read(artifact))
        print(f"plain read of {options.gigabytes:g} GB: {plain:.2f} s")
        print(f"check, nothing changed: {seconds(Artifact(artifact.uri).check):.3f} s")
        (Path(artifact.uri) / CHECKED).unlink()
        for name, act in {
            "check of a copy": Artifact(artifact.uri).check,
            "verify": Artifact(artifact.uri).verify,
        }.items():
            took, plain = seconds(act), seconds(lambda: read(artifact))
            print(f"{name}: {took:.2f} s, {took / plain:.2f} x the plain read after it")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
