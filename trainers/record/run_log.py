"""The log of a run's steps, kept beside its checkpoints: the training curve, how fast it went, and its ledger."""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from raytriever.artifacts.storage import Folder
from raytriever.reports.log import log
from raytriever.reports.table import counted
from trainers.engine.loop import Callback
from trainers.record.ledger import ledger_lines

TRAINING = "training.jsonl"
"""A model's curve: a point a line, without times."""
EVALUATIONS = "evaluations.jsonl"
"""What validation measured: ``step`` and ``measures`` a line."""
LEDGER = "ledger.json"

_PIECES = "curve/"
_STEPS_MEASURED = 10


class RunLog(Callback):
    """Collects the points of steps in ``folder``, and stores them just before a checkpoint is written.

    So every step up to a checkpoint has its point, whatever kills the run. ``throughput`` is that of the first steps,
    None until they are done.
    """

    def __init__(self, folder: Folder, device: torch.device) -> None:
        self.ledger: Mapping[str, Any] = {}
        self.throughput: Throughput | None = None
        self.folder = folder
        self._device = device
        self._points: list[Mapping[str, Any]] = []
        self._first_points: list[Mapping[str, Any]] = []

    def on_start(self, ledger: Mapping[str, Any]) -> None:
        """Keeps and shows the ledger."""
        self.ledger = ledger
        for line in ledger_lines(ledger):
            log.info(f"  {line}")

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Notes the step; after some of them, how fast they were."""
        self._points.append(point)
        if self.throughput is None:
            self._first_points.append(point)
            if len(self._first_points) == _STEPS_MEASURED or point["step"] == self.ledger.get("steps"):
                self.throughput = measure_throughput(self._first_points, self._device)
                for line in self.throughput.lines():
                    log.info(f"  {line}")

    def on_checkpoint(self, steps: int) -> None:  # noqa: ARG002
        """Stores what was noted since the last piece."""
        if self._points:
            name = f"{_PIECES}{self._points[-1]['step']:08d}.json"
            self.folder.write_bytes(name, json.dumps(self._points).encode())
            self._points = []

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.on_checkpoint(0)


def read_curve(folder: Folder) -> list[dict[str, Any]]:
    """Every step's point, in order; where a step was taken twice around a kill, the later one."""
    by_step: dict[int, dict[str, Any]] = {}
    for name in folder.files():
        if name.startswith(_PIECES):
            for point in json.loads(folder.read_bytes(name)):
                by_step[point["step"]] = point
    return [by_step[step] for step in sorted(by_step)]


def without_times(point: Mapping[str, Any]) -> dict[str, Any]:
    """What of a point is a function of the run's settings alone."""
    return {key: value for key, value in point.items() if not key.endswith("seconds")}


@dataclass(frozen=True)
class Throughput:
    """What some steps measured: rates over all ranks, and the memory of this process and its device at most, in bytes.

    ``device_bytes`` is None where there is no CUDA device; ``waiting_share`` of the time went into waiting for data.
    """

    steps: int
    examples_per_second: float
    tokens_per_second: float
    waiting_share: float
    process_bytes: int
    device_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the log."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For the terminal, below the ledger."""
        memory = f"{self.process_bytes / 2**30:.2f} GiB of memory"
        if self.device_bytes is not None:
            memory += f", {self.device_bytes / 2**30:.2f} GiB on the GPU"
        tokens = f"{self.tokens_per_second:,.0f} tokens/s, " if self.tokens_per_second else ""
        return [
            f"measured over {counted(self.steps, 'step')}:",
            f"  speed   {self.examples_per_second:,.1f} examples/s, {tokens}waiting {self.waiting_share:.1%}",
            f"  memory  at most {memory} (first rank)",
        ]


def measure_throughput(points: Sequence[Mapping[str, Any]], device: torch.device) -> Throughput:
    """Of the points of a curve (one a step, at least one). The first is left out of rates: it warms up."""
    timed = points[1:] or points
    seconds = max(sum(point["seconds"] for point in timed), 1e-9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Throughput(
        steps=len(timed),
        examples_per_second=sum(point["examples"] for point in timed) / seconds,
        tokens_per_second=sum(point.get("tokens", 0) for point in timed) / seconds,
        waiting_share=sum(point["waiting_seconds"] for point in timed) / seconds,
        process_bytes=peak if sys.platform == "darwin" else peak * 1024,  # kibibytes but on macOS
        device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
