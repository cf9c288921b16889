"""What a run on workers that fails says, which errors end it at once, and what it tells Ray's metrics."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

from raytriever.errors import StorageError, UserError
from raytriever.stages import metrics
from raytriever.stages.metrics import Metric
from raytriever.stages.stage import Resources
from retrieval.encoders.attention import KEEPS_MEMORY
from tests.unit.test_grafana import METRICS
from tests.unit.trainers.record.test_ledger import of_run
from trainers.jobs import workers
from trainers.jobs.worker import GPU_VARIABLES, RayMetrics, Spread, size_of_worker
from trainers.jobs.workers import EndAtMistakes, refusal_of
from trainers.record.ledger import negatives_per_query


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch):
    """What a run is where Ray Train ends in an error."""

    def fit_that_raises(error: Exception) -> str:
        def fit() -> None:
            raise error

        monkeypatch.setattr(workers, "trainer_of", lambda *_: SimpleNamespace(fit=fit))
        return workers.fit_on_workers({}, Spread(Resources(workers=2), None, 0))

    return fit_that_raises


def test_what_ended_a_run_is_said_in_its_words_and_a_controller_that_died_is_a_matter_of_running_again(fitted) -> None:
    with pytest.raises(UserError, match=r"controller.*has died.*Run the same command again"):
        fitted(ray.exceptions.ActorDiedError())
    raised = WorkerGroupError("Traceback …", {1: StorageError("s3://full: no room")})
    with pytest.raises(UserError, match=r"^s3://full: no room$") as caught:
        fitted(raised)
    assert caught.value.__cause__ is raised
    with pytest.raises(WorkerGroupError, match="Traceback"):
        fitted(WorkerGroupError("Traceback …", {1: RuntimeError("connection closed")}))


@pytest.mark.parametrize("error", [UserError("row 3 has no negative"), StorageError("s3://full: no room")], ids=repr)
def test_an_error_is_raised_where_other_workers_may_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: UserError
) -> None:
    def refuse() -> None:
        raise error

    board = SimpleNamespace(actor=SimpleNamespace(put_nowait=SimpleNamespace(remote=None)))
    arguments = {"settings": SimpleNamespace(located=refuse, output=str(tmp_path)), "board": board}
    arguments |= {"threads": torch.get_num_threads(), "derivation": None}
    monkeypatch.setattr(workers, "get_device", lambda: torch.device("cpu"))

    def train(world_size: int) -> str:
        context = SimpleNamespace(get_world_size=lambda: world_size, get_world_rank=lambda: 0)
        monkeypatch.setattr(workers.ray.train, "get_context", lambda: context)
        return workers.train_on_worker(arguments)

    assert json.loads(train(1)) == {"error": str(error)}  # alone, Ray Train has nobody to start again
    with pytest.raises(UserError) as caught:
        train(2)
    assert caught.value is error


def test_a_worker_with_a_gpu_tokenizes_on_all_of_its_cpus() -> None:
    cpus, variables = size_of_worker(Resources(gpus_per_worker=1, cpus_per_worker=3))
    assert cpus == 3
    assert (variables["TOKENIZERS_PARALLELISM"], variables["RAYON_NUM_THREADS"]) == ("true", "3")
    assert variables.items() >= GPU_VARIABLES.items()
    assert size_of_worker(Resources(cpus_per_worker=3)) == (3, KEEPS_MEMORY)


MISTAKE, FULL, LOST = UserError("row 3 has no negative"), StorageError("s3://full: no room"), RuntimeError("closed")


def test_a_mistake_is_raised_and_not_tried_again_and_bad_luck_left_to_the_next_attempt() -> None:
    """As Ray Train's controller handles both."""
    with pytest.raises(UserError) as caught:
        EndAtMistakes().after_exception(None, {2: UserError("later"), 0: LOST, 1: MISTAKE})
    assert caught.value is MISTAKE
    policy = DefaultFailurePolicy(FailureConfig(max_failures=3))
    assert policy.make_decision(ControllerError(caught.value)) is FailureDecision.RAISE
    EndAtMistakes().after_exception(None, {0: LOST, 1: FULL})
    policy = DefaultFailurePolicy(FailureConfig(max_failures=1))
    decisions = [policy.make_decision(WorkerGroupError("", {0: LOST, 1: FULL})) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]


@pytest.mark.parametrize(("raised", "said"), [
    (ControllerError(MISTAKE), str(MISTAKE)),
    (ControllerError(LOST), None),
    (WorkerGroupError("", {0: LOST, 1: FULL}), str(FULL)),
    (WorkerGroupError("", {1: UserError("later"), 0: MISTAKE}), str(MISTAKE)),
    (WorkerGroupError("", {0: LOST}), None),
    (LOST, None),
    (None, None),
], ids=repr)  # fmt: skip
def test_a_refusal_is_found_in_what_comes_back(raised: Exception | None, said: str | None) -> None:
    found = refusal_of(pickle.loads(pickle.dumps(raised)))  # from the controller's process
    assert found is None if said is None else str(found) == said


def test_each_step_tells_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[float]] = {}

    def record(self: metrics.StageMetrics, metric: Metric, value: float) -> None:
        assert self._tags == {"run": "mine", "stage": "model"}
        told.setdefault(metric.name.removeprefix("raytriever_training_"), []).append(value)

    monkeypatch.setattr(metrics.StageMetrics, "record", record)
    times = {"seconds": 0.5, "waiting_seconds": 0.125}
    point = {"learning_rate": 1e-5, "loss": 1.5, "examples": 12, "tokens": 340, **times}
    ledger = of_run().to_json()
    training = RayMetrics("/runs/mine/model")
    training.on_start(ledger)
    training.on_step(point | {"step": 1})
    training.on_step(point | {"step": 2, "loss": 0.75, "learning_rate": 2e-5})
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
    told.clear()
    RayMetrics("/runs/mine/model").on_step(point | {"step": 1})  # goes on without a ledger
    assert "negatives_per_query" not in told
