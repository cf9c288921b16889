"""What the first rank of a run notes while it goes on, and whom it tells."""

import hashlib
import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from raytriever.artifacts.artifact import Derivation, to_json
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.reports.log import log
from trainers.engine.early_stopping import Evaluation
from trainers.engine.loop import StepReport
from trainers.record.ledger import Ledger
from trainers.record.trackers import TrackedTraining, TrackingSettings, open_trackers
from trainers.run import Watchers

# The training curve: one point a step, kept in pieces beside the checkpoints so that no kill leaves a gap.

_PIECES = "curve/"


class Curve:
    """Collects the points of steps, and stores them just before a checkpoint is written.

    So every step up to a checkpoint has its point, whatever kills the run.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._points: list[dict[str, Any]] = []

    def add(self, point: dict[str, Any]) -> None:
        """Notes one step, as ``point_of`` has it."""
        self._points.append(point)

    def store(self) -> None:
        """Stores what was noted since the last piece."""
        if self._points:
            name = f"{_PIECES}{self._points[-1]['step']:08d}.json"
            self._folder.write_bytes(name, json.dumps(self._points).encode())
            self._points = []


def point_of(report: StepReport) -> dict[str, Any]:
    """A step as a flat mapping: what is stored, tracked and plotted of it."""
    return {
        "step": report.step,
        "epoch": report.epoch,
        "learning_rate": report.learning_rate,
        "loss": report.measured.loss,
        "gradient_norm": report.measured.gradient_norm,
        "examples": report.measured.examples,
        "tokens": report.measured.tokens,
        **report.measured.metrics,
        "seconds": report.seconds,
        "waiting_seconds": report.waiting_seconds,
    }


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


# How fast some steps went and how much memory they took: the second block below the ledger, and the log's.


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


def measure_throughput(points: Sequence[Mapping[str, Any]], device: torch.device) -> Throughput:
    """Of the points of a curve (one a step, at least one). The first is left out of rates: it warms up."""
    timed = points[1:] or points
    seconds = max(sum(point["seconds"] for point in timed), 1e-9)
    return Throughput(
        steps=len(timed),
        examples_per_second=sum(point["examples"] for point in timed) / seconds,
        tokens_per_second=sum(point.get("tokens", 0) for point in timed) / seconds,
        waiting_share=sum(point["waiting_seconds"] for point in timed) / seconds,
        process_bytes=peak_process_bytes(),
        device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def measured_lines(measured: Throughput) -> list[str]:
    """For the terminal, below the ledger."""
    memory = f"{measured.process_bytes / 2**30:.2f} GiB of memory"
    if measured.device_bytes is not None:
        memory += f", {measured.device_bytes / 2**30:.2f} GiB on the GPU"
    tokens = f"{measured.tokens_per_second:,.0f} tokens/s, " if measured.tokens_per_second else ""
    return [
        f"measured over {measured.steps:,} {'step' if measured.steps == 1 else 'steps'}:",
        f"  speed   {measured.examples_per_second:,.1f} examples/s, {tokens}waiting {measured.waiting_share:.1%}",
        f"  memory  at most {memory} (first rank)",
    ]


def peak_process_bytes() -> int:
    """The most memory that this process ever held in RAM."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_STEPS_MEASURED = 10


@dataclass(frozen=True)
class Heard:
    """What a worker reports: steps for the progress line, checkpoints for Ray Train.

    ``on_ledger`` gets the run in numbers before the first step.
    """

    on_step: Callable[[StepReport], None]
    on_checkpoint: Callable[[int], None]
    on_ledger: Callable[[Ledger], None] = lambda _: None


class RunRecord:
    """What the first rank notes of a run: its curve, its ledger, its evaluations; it tells the trackers too."""

    def __init__(
        self,
        tracking: TrackingSettings,
        output: str,
        derivation: Derivation,
        device: torch.device,
        heard: Heard,
    ) -> None:
        self.ledger: Ledger | None = None
        self.measured: list[dict[str, Any]] = []  # lines for the log
        self._curve = Curve(Folder(output))
        self._first_points: list[dict[str, Any]] = []
        self._device = device
        self._heard = heard
        self._trackers = open_trackers(tracking, tracked_training(tracking, output, derivation))
        self.watchers = Watchers(
            on_ledger=self._note_ledger,
            on_step=self._note_step,
            on_evaluation=self._note_evaluation,
            on_checkpoint=self._note_checkpoint,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for the trackers, after whatever ended the run, and tells them whether it failed."""
        failed = True
        try:
            self._curve.store()
            failed = kind is not None
        finally:
            self._trackers.close(failed=failed)

    def _note_ledger(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._heard.on_ledger(ledger)
        for line in ledger.lines():
            log.info(f"  {line}")

    def _note_step(self, report: StepReport) -> None:
        point = point_of(report)
        self._curve.add(point)
        self._trackers.log_step(point)
        if len(self._first_points) < _STEPS_MEASURED:
            self._first_points.append(point)
            if len(self._first_points) == _STEPS_MEASURED or report.step == report.total_steps:
                throughput = measure_throughput(self._first_points, self._device)
                self.measured.append({"throughput": throughput.to_json()})
                for line in measured_lines(throughput):
                    log.info(f"  {line}")
        self._heard.on_step(report)

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        self._trackers.log(evaluation.step, {f"dev/{name}": value for name, value in evaluation.measures.items()})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in list(evaluation.measures.items())[:4])
        log.info(f"  after {evaluation.step:,} steps: {shown} ({evaluation.seconds:.1f} s)")

    def _note_checkpoint(self, steps: int) -> None:
        self._curve.store()  # before the checkpoint: every step up to it has its point
        self._heard.on_checkpoint(steps)


def tracked_training(tracking: TrackingSettings, output: str, derivation: Derivation) -> TrackedTraining:
    """What trackers know the training by that makes ``output`` as ``derivation`` says.

    It is another one where the model is made anew of something else, and where it goes elsewhere, in a sweep say:
    then no checkpoint is gone on from either. Raises ``UserError`` where there is no local folder for the trackers.
    """
    digest = hashlib.sha256(to_json([output, asdict(derivation)])).hexdigest()
    return TrackedTraining(digest, _tracking_folder(tracking, output), derivation.config)


def _tracking_folder(tracking: TrackingSettings, output: str) -> Path:
    """Beside the artifact, in which only its own files stay."""
    if tracking.folder is None and tracking.trackers and "://" in output:
        raise UserError(
            f"The model goes to {output}, but trackers write to a local folder. Name one as tracking.folder; with"
            " several machines it is the first worker's."
        )
    return Path(tracking.folder or f"{output}-tracking")
