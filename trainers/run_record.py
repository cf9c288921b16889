"""What the first rank of a run notes while it goes on, and whom it tells."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from raytriever.retrieval.artifacts import Derivation, to_json
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder
from raytriever.trainers.curve import Curve, point_of
from raytriever.trainers.early_stopping import Evaluation
from raytriever.trainers.ledger import Ledger
from raytriever.trainers.loop import StepReport
from raytriever.trainers.run import Watchers
from raytriever.trainers.throughput import measure_throughput, measured_lines
from raytriever.trainers.tracker_kinds import TrackedTraining
from raytriever.trainers.trackers import TrackingSettings, open_trackers

_STEPS_MEASURED = 10


@dataclass(frozen=True)
class Heard:
    """Where a worker's words go: lines for the user, steps for the progress, checkpoints for Ray Train.

    ``on_ledger`` gets the run in numbers before the first step.
    """

    on_line: Callable[[str], None]
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
        self._trackers = open_trackers(tracking, tracked_training(tracking, output, derivation), heard.on_line)
        self.watchers = Watchers(
            on_ledger=self._note_ledger,
            on_step=self._note_step,
            on_evaluation=self._note_evaluation,
            on_checkpoint=self._note_checkpoint,
            say=heard.on_line,
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
            self._heard.on_line(f"  {line}")

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
                    self._heard.on_line(f"  {line}")
        self._heard.on_step(report)

    def _note_evaluation(self, evaluation: Evaluation) -> None:
        self._trackers.log(evaluation.step, {f"dev/{name}": value for name, value in evaluation.measures.items()})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in list(evaluation.measures.items())[:4])
        self._heard.on_line(f"  after {evaluation.step:,} steps: {shown} ({evaluation.seconds:.1f} s)")

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
