"""Ray Train around the plain loop: starts the workers, shows their progress, brings back the record or the error."""

import json
import logging
import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import ray
import ray.train
import torch
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, UserCallback, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import StorageError, UserError
from raytriever.reports.log import log, log_to
from raytriever.reports.progress import ProgressLine
from raytriever.stages.metrics import (
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
from trainers.engine.loop import StepReport
from trainers.jobs.allocator import worker_environment
from trainers.jobs.train import Train
from trainers.record.ledger import Ledger
from trainers.record.run_record import Heard

# What a training run's first worker tells the driver while it runs.
#
# A module of its own, without torch: the board's process imports it while training starts.


@dataclass(frozen=True)
class Step:
    """A step as the progress line shows it."""

    number: int
    examples: int
    note: str


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)  # what it forgets was for the eye only
class Board:
    """Where the first worker posts its steps and log records and the driver reads them, maybe on different machines."""

    def __init__(self) -> None:
        self._posted: list[Step | logging.LogRecord] = []

    def post(self, item: "Step | logging.LogRecord") -> None:
        """Adds what the driver has not read yet."""
        self._posted.append(item)

    def take(self) -> "list[Step | logging.LogRecord]":
        """What was posted since the last call."""
        posted, self._posted = self._posted, []
        return posted


# A mistake that one of several workers finds ends the run, in the worker's own words.
#
# A module of its own, without torch: Ray Train's controller imports it while training starts.


class EndAtMistakes(UserCallback):  # type: ignore[misc]
    """Ends the run where a worker raises a mistake; Ray Train by itself starts all workers again after any error.

    A mistake is a ``UserError`` that the next attempt would only repeat. Storage that fails may be well again by then,
    so a ``StorageError`` is none.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Raises the mistake of the first rank that has one: what a callback raises, Ray Train doesn't try again."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, UserError) and not isinstance(error, StorageError):
                raise error


def refusal_of(raised: BaseException | None) -> UserError | None:
    """What a worker refused, as far as that is why Ray Train ended the run with ``raised``; else None."""
    ended_by: list[Exception] = []
    if isinstance(raised, ControllerError):
        ended_by = [raised.controller_failure]
    elif isinstance(raised, WorkerGroupError):
        ended_by = [error for _, error in sorted(raised.worker_failures.items())]
    return next((error for error in ended_by if isinstance(error, UserError)), None)


# Ray's metrics of a training run, told step by step by its first rank.


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


_POLL_SECONDS = 0.5
_ROUNDING = 1e-6  # of a quotient: three workers of 1/3 of a GPU fit on one


def fit(stage: Train, progress: ProgressLine) -> ShardRecord:
    """Runs ``stage.train_here`` on every worker. Raises ``UserError`` for what a worker refused."""
    stage = stage.for_workers()
    # beside the driver, which reads it: another node may be lost while training goes on without it
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = Board.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    resources = stage.config.resources
    workers = resources.workers or 1
    fewest = stage.config.fewest_workers
    cpus = resources.cpus_per_worker or _cpus_of_a_worker(workers, resources.gpus_per_worker)
    use_gpu = resources.gpus_per_worker > 0
    per_worker = {"CPU": cpus} | ({"GPU": resources.gpus_per_worker} if use_gpu else {})
    trainer = TorchTrainer(
        _train_on_worker,
        train_loop_config={"stage": stage, "board": board, "threads": max(1, int(cpus))},
        scaling_config=ScalingConfig(
            num_workers=workers if fewest is None else (fewest, workers),
            use_gpu=use_gpu,
            resources_per_worker=per_worker,
        ),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=RunConfig(
            # Checkpoints are ours; a new name keeps Ray Train from going on with a state of its own
            name=f"attempt-{uuid.uuid4().hex[:8]}",
            storage_path=f"{stage.config.output}/ray-train",
            failure_config=FailureConfig(max_failures=stage.config.failures_survived),
            callbacks=[EndAtMistakes()],
            worker_runtime_env=None if use_gpu else {"env_vars": worker_environment()},
        ),
    )
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = trainer.fit()
        except BaseException as error:  # handed to the main thread, which raises it
            outcome["raised"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started = False
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        for item in ray.get(board.take.remote()):
            if isinstance(item, logging.LogRecord):
                log.handle(item)
                continue
            if not started:
                progress.start_at((item.number - 1) * item.examples)
                started = True
            progress.advance(item.examples, item.note)
    ray.kill(board)
    return _record(outcome)


def _record(outcome: dict[str, Any]) -> ShardRecord:
    """What the run gave, or the error that the user reads."""
    raised = outcome.get("raised")
    if isinstance(raised, ray.exceptions.RayActorError):
        raise UserError(
            f"Ray Train's controller, a process beside this one, has died ({str(raised).splitlines()[0]}). Checkpoints"
            " are kept: run the same command again, it goes on from the last one."
        ) from raised
    refused = refusal_of(raised)
    if refused is not None:
        raise UserError(str(refused)) from raised
    if raised is not None:
        raise raised
    returned = json.loads(outcome["result"].return_value)
    if "error" in returned:
        raise UserError(returned["error"])
    return ShardRecord.from_json(returned["record"])


class NodeRoom(NamedTuple):
    """What a node hands out."""

    cpus: int
    gpus: float = 0

    def workers(self, cpus: int, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs it holds."""
        held = self.cpus // cpus
        return min(held, int(self.gpus / gpus + _ROUNDING)) if gpus > 0 else held


def _cpus_of_a_worker(workers: int, gpus_per_worker: float) -> int:
    """The even share, and a word to the user where the nodes that workers will run on are not there yet."""
    nodes = [
        NodeRoom(int(node["Resources"].get("CPU", 0)), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]
    if not any(node.workers(1, gpus_per_worker) for node in nodes):
        kind = "GPUs" if gpus_per_worker > 0 else "CPUs"
        log.info(
            f"  no node with {kind} for a worker is there yet, so each worker asks for 1 CPU;"
            " resources.cpus_per_worker asks for more"
        )
    return even_share(nodes, workers, gpus_per_worker)


def even_share(nodes: Sequence[NodeRoom], workers: int, gpus_per_worker: float = 0) -> int:
    """The most CPUs that each of ``workers`` can have at a time, none of them spanning two nodes; at least 1.

    Nodes without room for a worker's GPUs hold none. Where the GPUs are too few for all workers, the share is of as
    many as they are enough for: fewer CPUs would bring in no more of them.
    """
    if gpus_per_worker > 0:
        workers = min(workers, sum(node.workers(1, gpus_per_worker) for node in nodes))
    share = max([1, *(node.cpus for node in nodes if node.workers(1, gpus_per_worker))])
    while share > 1 and sum(node.workers(share, gpus_per_worker) for node in nodes) < workers:
        share -= 1
    return share


def _train_on_worker(arguments: dict[str, Any]) -> str:
    stage, board = arguments["stage"], arguments["board"]
    torch.set_num_threads(arguments["threads"])
    metrics = TrainingMetrics(stage.config.output)

    def on_step(report: StepReport) -> None:
        metrics.note_step(report)
        note = f"loss {report.measured.loss:.3f}, learning rate {report.learning_rate:.1e}"
        board.post.remote(Step(report.step, report.measured.examples, note))

    heard = Heard(
        on_step=on_step,
        on_checkpoint=lambda steps: ray.train.report({"step": steps}),
        on_ledger=metrics.note_ledger,
    )
    try:
        # what concerns the run is logged by all ranks alike and shown once, and warnings of storage by any
        first = ray.train.get_context().get_world_rank() == 0
        with log_to(board.post.remote, level=logging.INFO if first else logging.WARNING):
            record = stage.train_here(get_device(), heard)
    except UserError as error:
        if ray.train.get_context().get_world_size() > 1:
            raise  # others may wait for this rank, and Ray Train stops them; where one returns, it waits with them
        return json.dumps({"error": str(error)})
    return json.dumps({"record": asdict(record)} if record else {})
