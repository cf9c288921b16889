"""Ray's metrics of a training run, told step by step by its first rank."""

from raytriever.retrieval.jobs.metrics import (
    EXAMPLES,
    LEARNING_RATE,
    LOSS,
    NEGATIVES,
    SECONDS,
    STEP_SECONDS,
    TOKENS,
    WAITING_SECONDS,
    StageMetrics,
)
from raytriever.trainers.ledger import Ledger
from raytriever.trainers.loop import StepReport


class TrainingMetrics:
    """Tells of the run whose model goes to ``output``."""

    def __init__(self, output: str) -> None:
        self._metrics = StageMetrics(output)
        self._negatives: float | None = None

    def note_ledger(self, ledger: Ledger) -> None:
        """What is constant over the run."""
        self._negatives = ledger.negatives

    def note_step(self, report: StepReport) -> None:
        """One step. Gauges are set by every step, because Ray forgets one that is not set for some time."""
        record = self._metrics.record
        record(EXAMPLES, report.measured.examples)
        record(TOKENS, report.measured.tokens)
        record(SECONDS, report.seconds)
        record(WAITING_SECONDS, report.waiting_seconds)
        record(STEP_SECONDS, report.seconds)
        record(LOSS, report.measured.loss)
        record(LEARNING_RATE, report.learning_rate)
        if self._negatives is not None:
            record(NEGATIVES, self._negatives)
