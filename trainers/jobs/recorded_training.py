"""A training with its log, its trackers and its model: what a worker does, and the command's own process."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from raytriever.artifacts.artifact import Derivation, ShardRecord
from raytriever.artifacts.storage import Folder, storage_errors
from raytriever.reports.progress import ProgressLine
from trainers.engine.callback import Callback
from trainers.engine.collectives import failing_together
from trainers.record.run_log import RunLog
from trainers.record.trackers import open_trackers, tracked_training
from trainers.training_run import run_training, write_model


def recorded_training(
    settings: Any, derivation: Derivation, device: torch.device, callbacks: Sequence[Callback], *, is_first: bool = True
) -> ShardRecord | None:
    """Trains as a ``TrainConfig`` says, on every rank; the first keeps the log, tells trackers and writes the model.

    Returns the record of the model, on other ranks None. Raises ``UserError`` as ``run_training`` does.
    """
    output = settings.output
    with ExitStack() as stack:
        located = settings.located()  # all ranks at once: none waits while another hashes weights
        run_log = RunLog(Folder(output), device)
        with failing_together(device):
            if is_first:
                training = tracked_training(settings.tracking, output, derivation)
                callbacks = [open_trackers(settings.tracking, training), run_log, *callbacks]
        for callback in callbacks:  # left in the reverse order, so that trackers learn of every failure
            stack.enter_context(callback)
        with storage_errors(output):  # retrying would waste as many starts as failures_survived
            objective, trained = run_training(settings, located, output, device, callbacks)
        return write_model(settings, derivation, objective, trained, run_log) if is_first else None


class ShownProgress(Callback):
    """Shows steps on a progress line."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress = progress
        self._started = False

    def on_step(self, point: Mapping[str, Any]) -> None:
        """The whole point."""
        if not self._started:
            self._progress.start_at((point["step"] - 1) * point["examples"])
            self._started = True
        said = f"loss {point['loss']:.3f}, learning rate {point['learning_rate']:.1e}"
        self._progress.advance(point["examples"], said)
