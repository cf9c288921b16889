"""The log of a run's steps, kept beside its checkpoints: the training curve, how fast it went, and its ledger."""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytriever.artifacts.storage import Folder
from raytriever.reports.log import log
from raytriever.reports.table import counted
from trainers.engine.callback import Callback
from trainers.record.ledger import ledger_lines

if TYPE_CHECKING:
    import torch

TRAINING = "training.jsonl"
"""A model's curve: a point a line, without times."""
EVALUATIONS = "evaluations.jsonl"
"""What validation measured: ``step`` and ``measures`` a line."""
LEDGER = "ledger.json"

_PIECES = "curve/"
_STEPS_MEASURED = 10


class RunLog(Callback):
    """Collects the points of steps in ``folder``, and stores them just before a checkpoint is written.

    So every step up to a checkpoint has its point, whatever kills the run.
    """

    def __init__(self, folder: Folder, device: "torch.device") -> None:
        self.ledger: Mapping[str, Any] = {}
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
        if len(self._first_points) < _STEPS_MEASURED:
            self._first_points.append(point)
            if len(self._first_points) == _STEPS_MEASURED or point["step"] == self.ledger.get("steps"):
                log.info(f"  {measured(self._first_points, self._device)}")

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
    pieces = (json.loads(folder.read_bytes(name)) for name in folder.files() if name.startswith(_PIECES))
    by_step = {point["step"]: point for piece in pieces for point in piece}
    return [by_step[step] for step in sorted(by_step)]


def without_times(point: Mapping[str, Any]) -> dict[str, Any]:
    """What of a point is a function of the run's settings alone."""
    return {key: value for key, value in point.items() if not key.endswith("seconds")}


def utilization(points: Sequence[Mapping[str, Any]]) -> str:
    """The share of GPUs' peak that steps used, in words; '' where it isn't known, as on CPUs."""
    if not all("peak_seconds" in point for point in points):
        return ""
    share = sum(point["peak_seconds"] for point in points) / max(sum(point["seconds"] for point in points), 1e-9)
    return f", {share:.1%} of the GPUs' peak (MFU)"


def measured(points: Sequence[Mapping[str, Any]], device: "torch.device") -> str:
    """What some steps measured (at least one), for the terminal: rates over all ranks, memory of this process at most.

    The first step is left out of rates where there are others: it warms up.
    """
    timed = points[1:] or points
    seconds = max(sum(point["seconds"] for point in timed), 1e-9)
    examples, waiting = (sum(point[name] for point in timed) / seconds for name in ("examples", "waiting_seconds"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    advice = " (more resources.cpus_per_worker tokenize faster)" if device.type == "cuda" and waiting > 0.1 else ""
    memory = f"{peak / (2**30 if sys.platform == 'darwin' else 2**20):.2f} GiB"  # kibibytes but on macOS
    if device.type == "cuda":
        import torch

        memory += f" and {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of its GPU"
    return (
        f"measured over {counted(len(timed), 'step')}: {examples:,.1f} examples/s, {waiting:.1%} of the time waiting"
        f" for data{advice}{utilization(timed)}; the first rank used at most {memory}"
    )
