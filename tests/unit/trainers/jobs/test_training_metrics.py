"""A training step as Ray's metrics have it."""

import pytest

from raytriever.stages import metrics
from raytriever.stages.metrics import METRICS, Metric
from tests.unit.trainers.record.test_ledger import of_run
from trainers.engine.loop import StepReport
from trainers.engine.step import Measured
from trainers.jobs.workers import TrainingMetrics


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}

    def record(self: metrics.StageMetrics, metric: Metric, value: float) -> None:
        assert self._tags == {"run": "mine", "stage": "model"}
        values.setdefault(metric.name.removeprefix("raytriever_training_"), []).append(value)

    monkeypatch.setattr(metrics.StageMetrics, "record", record)
    return values


def report(step: int) -> StepReport:
    measured = Measured(loss=1.5 / step, gradient_norm=2.0, examples=12, tokens=340, metrics={})
    return StepReport(step, 9, 0, 1e-5 * step, seconds=0.5, waiting_seconds=0.125, measured=measured)


def test_each_step_tells_everything(told: dict[str, list[float]]) -> None:
    ledger = of_run()
    training = TrainingMetrics("/runs/mine/model")
    training.note_ledger(ledger)
    for step in (1, 2):
        training.note_step(report(step))
    assert told == {
        "examples": [12, 12],
        "tokens": [340, 340],
        "seconds": [0.5, 0.5],
        "waiting_seconds": [0.125, 0.125],
        "step_seconds": [0.5, 0.5],
        "loss": [1.5, 0.75],
        "learning_rate": [1e-5, 2e-5],
        "negatives_per_query": [ledger.negatives, ledger.negatives],  # again: Ray forgets a gauge after some seconds
    }
    of_training = {metric.name for metric in METRICS if "_training_" in metric.name}
    assert {f"raytriever_training_{name}" for name in told} == of_training


def test_a_run_that_goes_on_without_a_ledger_has_no_negatives(told: dict[str, list[float]]) -> None:
    TrainingMetrics("/runs/mine/model").note_step(report(1))
    assert "negatives_per_query" not in told
