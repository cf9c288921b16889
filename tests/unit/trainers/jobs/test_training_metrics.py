"""A training step as Ray's metrics have it."""

from typing import Any

import pytest

from raytriever.stages import metrics
from raytriever.stages.metrics import Metric
from tests.unit.test_grafana import METRICS
from tests.unit.trainers.record.test_ledger import of_run
from trainers.jobs.worker import RayMetrics
from trainers.record.ledger import negatives_per_query


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}

    def record(self: metrics.StageMetrics, metric: Metric, value: float) -> None:
        assert self._tags == {"run": "mine", "stage": "model"}
        values.setdefault(metric.name.removeprefix("raytriever_training_"), []).append(value)

    monkeypatch.setattr(metrics.StageMetrics, "record", record)
    return values


def point(step: int) -> dict[str, Any]:
    times = {"seconds": 0.5, "waiting_seconds": 0.125}
    return {"step": step, "learning_rate": 1e-5 * step, "loss": 1.5 / step, "examples": 12, "tokens": 340, **times}


def test_each_step_tells_everything(told: dict[str, list[float]]) -> None:
    ledger = of_run().to_json()
    training = RayMetrics("/runs/mine/model")
    training.on_start(ledger)
    for step in (1, 2):
        training.on_step(point(step))
    negatives = negatives_per_query(ledger)
    assert told == {
        "examples": [12, 12],
        "tokens": [340, 340],
        "seconds": [0.5, 0.5],
        "waiting_seconds": [0.125, 0.125],
        "step_seconds": [0.5, 0.5],
        "loss": [1.5, 0.75],
        "learning_rate": [1e-5, 2e-5],
        "negatives_per_query": [negatives, negatives],  # again: Ray forgets a gauge after some seconds
    }
    of_training = {metric.name for metric in METRICS if "_training_" in metric.name}
    assert {f"raytriever_training_{name}" for name in told} == of_training


def test_a_run_that_goes_on_without_a_ledger_has_no_negatives(told: dict[str, list[float]]) -> None:
    RayMetrics("/runs/mine/model").on_step(point(1))
    assert "negatives_per_query" not in told
