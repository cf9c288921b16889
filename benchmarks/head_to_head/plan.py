"""What is tried: students, learning rates, temperatures, and the trials as they are stored."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.head_to_head.data import MIXTURE, QUERIES, Limits
from benchmarks.head_to_head.trial import Student
from benchmarks.head_to_head.ways import WAYS

TEMPERATURES = (0.05, 0.02, 0.01)
REFERENCE = "pairs"
"""The way whose time the others are given too."""
MORE_EPOCHS = "more epochs"
"""The purpose of a final trial on few pairs with about as many steps as other collections give."""
_TIMES = 4
MAX_LENGTH = 64
KNOWN = Path(__file__).with_name("trials.parquet")
"""The rows that the report rests on."""
_STATIC = tuple(name for name, way in WAYS.items() if not way.guided)  # their guided loss takes transformers alone
_TRANSFORMER = (
    REFERENCE, "pairs, all directions", "pairs, a dataset a domain", "mined negatives, positive-aware", "guided",
    "guided, without contrasts", "guided, without contrasts, batches of 16",
    "guided, without contrasts, batches of 256", "guided, a mined negative",
    "guided, a mined negative, without contrasts", "vectors, distilled", "mined negatives, distilled",
    "random, masked", "random, masked, distilled", "contextual", "in turns", "in turns, distilled",
    "in turns, margin -.1", "in turns, all directions", "in turns, a mined negative",
    "in turns, a mined negative, distilled", "in turns, distilled, batches of 16",
    "in turns, distilled, batches of 256",
)  # fmt: skip
STUDENTS = {
    "static": Student(
        0, Limits(4_000, 4_000), 4, (1e-3, 3e-3, 1e-2), _STATIC, ("conala", "nfcorpus_filtered", MIXTURE)
    ),
    "two layers": Student(2, Limits(2_000, 2_500), 2, (3e-4, 1e-3), _TRANSFORMER),
    "MiniLM": Student(
        6,
        Limits(2_000, 2_500),
        2,
        (3e-5, 1e-4, 3e-4),
        (REFERENCE, "random, masked", "in turns", "in turns, margin -.1", "in turns, margin -.1, distilled"),
        ("conala", MIXTURE),
        untuned=("random, masked", "in turns, margin -.1", "in turns, margin -.1, distilled"),
    ),
}


@dataclass(frozen=True)
class Trial:
    """``purpose``: tuning, or a final one: of equal ``data``, in ``MORE_EPOCHS``, of equal ``seconds`` in ``steps``.

    A stored row that a better tuned one replaced says behind a comma where its rate was from.
    """

    student: str
    collection: str
    way: str
    purpose: str
    seed: int
    learning_rate: float
    temperature: float
    steps: int | None = None

    @property
    def epochs(self) -> int:
        """How often it goes through the pairs."""
        return STUDENTS[self.student].epochs * (_TIMES if self.purpose == MORE_EPOCHS else 1)

    @property
    def design(self) -> str:
        """A hash of all else that the trial depends on: rows of another design are not reused."""
        student, way = STUDENTS[self.student], WAYS[self.way]
        described = student.layers, student.limits, self.epochs, way, MAX_LENGTH, QUERIES
        return hashlib.sha256(repr(described).encode()).hexdigest()[:12]


def stored_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Those of a parquet file, or the whole lines of JSON: the last one may have been cut off."""
    if file.suffix == ".parquet":
        for row in pq.read_table(file).to_pylist() if file.exists() else ():
            yield {name: value for name, value in row.items() if value is not None}
        return
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"Left out: a line of {file} that is cut off.")
