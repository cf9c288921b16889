"""What a run reports while it trains, and the receivers."""

from collections.abc import Mapping
from typing import Any, Self

from trainers.engine.early_stopping import Evaluation


class Callback:
    """Gets what a run reports, on the rank that it is given to; it does nothing with what it doesn't override.

    It is entered before the run and left after it, with the error that ended it if there is one.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return

    def on_start(self, ledger: Mapping[str, Any]) -> None:
        """The run in numbers, before its first step: a ``trainers.record.ledger.Ledger`` as JSON values."""

    def on_step(self, point: Mapping[str, Any]) -> None:
        """One step, all ranks taken together: a flat mapping.

        ``step`` counts from 1, ``epoch`` from 0. ``learning_rate``. The figures of ``compute_gradients``. ``seconds``:
        wall-clock. ``waiting_seconds``: the part spent waiting for data. ``peak_seconds``, on known GPUs: what the
        step's arithmetic would take at their peak.
        """

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called with the measures of validation."""

    def on_checkpoint(self, steps: int) -> None:
        """The steps done, just before the checkpoint is written."""
