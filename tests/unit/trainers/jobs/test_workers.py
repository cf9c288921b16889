"""What a run on workers that fails says, which errors end it at once, and what it tells Ray's metrics."""

import json
import logging
import pickle
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import StorageError, UserError
from raytriever.reports.log import log
from raytriever.stages import metrics
from raytriever.stages.metrics import Metric
from raytriever.stages.ray_session import Board
from raytriever.stages.stage import Resources
from retrieval.encoders.attention import KEEPS_MEMORY
from tests.unit.test_grafana import METRICS
from tests.unit.trainers.record.test_ledger import of_run
from trainers.engine.callback import Callback
from trainers.jobs import worker, workers
from trainers.jobs.worker import GPU_VARIABLES, RayMetrics, RelayedProgress, Spread, outcome_of, size_of_worker
from trainers.jobs.workers import EndAtMistakes, RayCheckpoints, refusal_of
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

    board = SimpleNamespace(post=SimpleNamespace(remote=None))
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


def size_of(**resources: Any) -> tuple[float, dict[str, str]]:
    return size_of_worker(Spread(Resources(**resources), None, 0))


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node(CPU=64.0, GPU=8.0)])


def test_a_worker_with_a_gpu_tokenizes_on_all_of_its_cpus() -> None:
    cpus, variables = size_of(gpus_per_worker=1, cpus_per_worker=3)
    assert cpus == 3
    assert (variables["TOKENIZERS_PARALLELISM"], variables["RAYON_NUM_THREADS"]) == ("true", "3")
    assert variables.items() >= GPU_VARIABLES.items()
    assert size_of(cpus_per_worker=3) == (3, KEEPS_MEMORY)


def node(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": resources}


def test_without_a_number_of_cpus_a_worker_has_its_share_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node(CPU=12.0, GPU=4.0), node(CPU=8.0)])
    assert size_of()[0] == 12
    assert size_of(workers=2)[0] == 8
    cpus, variables = size_of(workers=4, gpus_per_worker=0.5)
    assert (cpus, variables["RAYON_NUM_THREADS"]) == (3, "3")


def test_workers_that_a_machine_alone_never_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node(CPU=2.0)])
    for resources in ({"workers": 4}, {"gpus_per_worker": 1}):
        asked: Any = Resources.model_validate({**resources, "cpus_per_worker": 1})
        with pytest.raises(
            UserError, match=r"has room for [02] workers of 1 CPUs and [01] GPUs, .* needs [14]\. Lower"
        ):
            size_of_worker(Spread(asked, None, 0, is_alone=True))
        assert size_of_worker(Spread(asked, None, 0))[0] == 1  # where nodes may join
    assert size_of_worker(Spread(Resources(workers=4, cpus_per_worker=1), 2, 0, is_alone=True))[0] == 1


def test_a_worker_that_is_killed_too_often_is_a_matter_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: Any) -> None:
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(worker, "train_alone", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=print)))
    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(UserError, match=r"killed more often than failures_survived \(2\), mostly because memory"):
        worker.fit_alone({}, Spread(Resources(cpus_per_worker=1), None, 2))


@pytest.mark.parametrize(("resources", "fewest", "nodes", "expected"), [
    ({"workers": 3, "cpus_per_worker": 2}, None, 1,
     {"workers": 3, "per_worker": {"CPU": 2.0}, "gpu": False, "backend": "gloo", "alone": True}),
    ({"workers": 3, "cpus_per_worker": 0.5, "gpus_per_worker": 1}, 2, 2,
     {"workers": (2, 3), "per_worker": {"CPU": 0.5, "GPU": 1.0}, "gpu": True, "backend": "nccl", "alone": False}),
    ({"cpus_per_worker": 2, "gpus_per_worker": 0.5}, None, 1,
     {"workers": 1, "per_worker": {"CPU": 2.0, "GPU": 0.5}, "gpu": True, "backend": "nccl", "alone": True}),
])  # fmt: skip
def test_what_ray_train_is_asked_for(
    monkeypatch, resources: Any, fewest: int | None, nodes: int, expected: Any
) -> None:
    monkeypatch.setattr(workers, "TorchTrainer", lambda work, **options: {"work": work, **options})
    monkeypatch.setattr(ray, "nodes", lambda: [node()] * nodes)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked: Any = Resources.model_validate(resources)
    arguments = {"settings": SimpleNamespace(output="/runs/mine/model"), "board": "board"}
    made: Any = workers.trainer_of(print, arguments, Spread(asked, fewest, 7))
    assert made["work"] is print
    threads = max(1, int(asked.cpus_per_worker))
    assert made["train_loop_config"] == {**arguments, "threads": threads}
    scaling, process_group, run = made["scaling_config"], made["torch_config"], made["run_config"]
    assert scaling.num_workers == expected["workers"]
    assert (scaling.use_gpu, scaling.resources_per_worker) == (expected["gpu"], expected["per_worker"])
    assert process_group.backend == expected["backend"]
    assert isinstance(process_group, workers._OneMachine) is expected["alone"]
    assert run.storage_path == "/runs/mine/model/ray-train"
    assert run.failure_config.max_failures == 7
    assert [type(callback) for callback in run.callbacks] == [EndAtMistakes]
    variables = size_of_worker(Spread(asked, fewest, 7))[1] | (workers._LOOPBACK if expected["alone"] else {})
    assert run.worker_runtime_env == {"env_vars": variables}
    assert run.name != workers.trainer_of(print, arguments, Spread(asked, fewest, 7))["run_config"].name


@pytest.mark.parametrize(
    ("platform", "address", "nodes", "alone"),
    [("linux", None, 1, True), ("darwin", None, 1, False), ("linux", "10.0.0.9", 1, False), ("linux", None, 2, False)],
)
def test_ranks_meet_at_a_file_on_one_machine(monkeypatch, tmp_path, platform, address, nodes, alone) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ray, "nodes", lambda: [node()] * nodes)
    monkeypatch.setenv("RAY_ADDRESS", address) if address else monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert workers._is_one_machine() is alone
    done, waited = list[Any](), list[Any]()

    class Group:
        def execute(self, function: Any) -> None:
            done.append(function)

        def execute_single_async(self, rank: int, _: Any, **how: Any) -> int:
            done.append(how)
            return rank

        def __len__(self) -> int:
            return 3

    monkeypatch.setattr(workers, "session_folder", lambda: tmp_path)
    monkeypatch.setattr(ray, "get", waited.append)
    config = workers._OneMachine(backend="gloo", timeout_s=60)
    assert config.backend_cls is workers._MeetingAtAFile
    config.backend_cls().on_start(Group(), config)
    assert done.pop(0) is workers._set_torch_distributed_env_vars
    places = {how.pop("init_method") for how in done}
    assert len(places) == 1
    assert places.pop().startswith(f"file://{tmp_path}/ranks-")
    common = {"backend": "gloo", "world_size": 3, "timeout_s": 60}
    assert done == [{**common, "world_rank": rank} for rank in range(3)]
    assert waited == [[0, 1, 2]]


@pytest.mark.parametrize(("gpus", "cpus", "device"), [(0, 3, "cpu"), (1, 3, "cuda:0"), (0.5, 0.5, "cuda:0")])
def test_a_single_worker_is_a_task_that_ray_begins_again(monkeypatch, gpus: float, cpus: float, device: str) -> None:
    asked: dict[str, Any] = {}
    task = SimpleNamespace(remote=lambda *arguments: arguments)
    monkeypatch.setattr(worker, "train_alone", SimpleNamespace(options=lambda **how: asked.update(how) or task))
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    resources = Resources(gpus_per_worker=gpus, cpus_per_worker=cpus)
    got = worker.fit_alone({"board": "board"}, Spread(resources, None, 7))
    assert got == str(({"board": "board", "threads": max(1, int(cpus))}, device))
    variables = size_of_worker(Spread(resources, None, 7))[1]
    assert asked == {
        "num_cpus": cpus, "num_gpus": gpus, "max_retries": 7, "retry_exceptions": True,
        "runtime_env": {"env_vars": variables},
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_records_and_all_warn(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    posted, threads, called = list[str](), list[int](), list[Any]()
    board = SimpleNamespace(post=SimpleNamespace(remote=lambda record: posted.append(record.getMessage())))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def recorded(*those: Any, is_first: bool) -> str:
        called.append((those, is_first))
        log.info("of the run")
        log.warning("of storage")
        return "record"

    monkeypatch.setattr(worker, "recorded_training", recorded)
    settings, own = SimpleNamespace(output="/runs/mine/model"), Callback()
    arguments = {"settings": settings, "derivation": "d", "board": board, "threads": 3}
    assert worker.run_on_worker(arguments, torch.device("cpu"), rank, [own]) == "record"  # type: ignore[comparison-overlap]
    (((*those, callbacks), is_first),) = called
    assert those == [settings, "d", torch.device("cpu")]
    assert is_first is (rank == 0)
    assert callbacks[-1] is own
    assert [type(callback) for callback in callbacks[:-1]] == ([RayMetrics, RelayedProgress] if rank == 0 else [])
    assert threads == [3]
    assert posted == (["of the run", "of storage"] if rank == 0 else ["of storage"])


def test_each_rank_announces_checkpoints_and_the_first_posts_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ray.train, "report", told.append)
    RayCheckpoints().on_checkpoint(12)
    board: Any = SimpleNamespace(post=SimpleNamespace(remote=told.append))
    RelayedProgress(board).on_step({"step": 3})
    assert told == [{"step": 12}, {"step": 3}]


RECORD = ShardRecord("run", 5, ())


@pytest.mark.parametrize("returned", [RECORD, UserError("refused"), ValueError("a defect")], ids=repr)
def test_a_run_elsewhere_is_shown_while_it_runs_and_ends_as_it_did(monkeypatch, logged, returned: Any) -> None:
    shown, ended = list[Any](), list[Any]()
    record = log.makeRecord(log.name, logging.INFO, "", 0, "seen", (), None)
    board = Board()
    for item in (record, {"step": 1}):
        board.post(item)
    monkeypatch.setattr(worker, "ShownProgress", lambda _: SimpleNamespace(on_step=shown.append))

    looked = threading.Event()
    actor: Any = SimpleNamespace(take=SimpleNamespace(remote=lambda: looked.set() or board.take()))
    monkeypatch.setattr(ray, "get", lambda taken: taken)
    monkeypatch.setattr(ray, "kill", ended.append)

    def run() -> ShardRecord:
        if isinstance(returned, Exception):
            raise returned
        assert isinstance(returned, ShardRecord)
        return returned

    def fit() -> str:
        looked.wait(60)
        assert threading.current_thread().daemon  # an interrupt of the driver waits for nobody
        if isinstance(returned, ValueError):
            raise returned
        return worker.returned_to_driver(run)

    progress: Any = None
    if returned is RECORD:
        assert outcome_of(fit, actor, progress) == RECORD
    else:
        with pytest.raises(type(returned), match=str(returned)):
            outcome_of(fit, actor, progress)
    assert (logged, shown, ended) == (["seen"], [{"step": 1}], [actor])


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
