"""What a training run's first worker tells the driver while it runs.

A module of its own, without torch: the board's process imports it while training starts.
"""

from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class Step:
    """A step as the progress line shows it."""

    number: int
    examples: int
    note: str


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)  # what it forgets was for the eye only
class Board:
    """Where the first worker posts its steps and lines and the driver reads them, maybe on different machines."""

    def __init__(self) -> None:
        self._posted: list[Step | str] = []

    def post(self, item: "Step | str") -> None:
        """Adds what the driver has not read yet."""
        self._posted.append(item)

    def take(self) -> "list[Step | str]":
        """What was posted since the last call."""
        posted, self._posted = self._posted, []
        return posted
