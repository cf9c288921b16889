"""Ray Train around the plain loop: starts the workers, shows their progress, brings back the record or the error."""

import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import ray
import ray.exceptions
import ray.train
import torch
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, UserCallback, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend
from ray.util.queue import Queue

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
from raytriever.stages.placement import cpus_of_a_worker, tokenizing_threads
from raytriever.stages.ray_session import session_folder
from raytriever.stages.stage import Resources, Stage
from trainers.engine.callback import Callback
from trainers.jobs.recorded_training import ShownProgress, recorded_training
from trainers.record.ledger import negatives_per_query

_POLL_SECONDS = 0.5

# How glibc allocates in a worker on CPUs; other C libraries ignore it. By itself it gives the large blocks of a step
# back to the system, which maps and zeroes every page anew in the next: a sixth of a small run's time on CPUs
# (`benchmarks/ray_train_share`). So blocks come from one heap, which is never trimmed.
GLIBC_KEEPS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}

# Every step has other shapes, which CUDA's allocator by itself leaves in pieces; and cuBLAS needs a workspace of its
# own for each stream where equal runs are to give equal bits (training.deterministic).
GPU_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Interfaces by which ranks of one machine meet: they ask for no token, so nobody else may reach them
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _is_one_machine() -> bool:
    """Whether Ray is this command's own, or this process's on one node; a cluster may get more while workers start."""
    return sys.platform == "linux" and not os.environ.get("RAY_ADDRESS") and len(ray.nodes()) == 1


def gpus_of_cluster() -> str:
    """The kinds of GPUs that Ray has found, as it calls them: ``A100``."""
    found = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
    return " ".join(name.partition(":")[2] for name in sorted(found) if name.startswith("accelerator_type:"))


class _OneMachine(TorchConfig):  # type: ignore[misc]
    """A process group whose ranks meet at a file of this user's alone.

    PyTorch's store, by which they meet otherwise, listens on all of the machine's addresses and lets anybody write.
    """

    @property
    def backend_cls(self) -> type[Any]:
        """What starts the process group."""
        return _MeetingAtAFile


class _MeetingAtAFile(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Starts the process group on every worker."""
        worker_group.execute(_set_torch_distributed_env_vars)
        place = f"file://{session_folder()}/ranks-{uuid.uuid4().hex}"
        started = [
            worker_group.execute_single_async(
                rank,
                _setup_torch_process_group,
                backend=backend_config.backend,
                world_rank=rank,
                world_size=len(worker_group),
                init_method=place,
                timeout_s=backend_config.timeout_s,
            )
            for rank in range(len(worker_group))
        ]
        ray.get(started)


class Spread(NamedTuple):
    """Over how many workers, and how many losses of workers a run survives; see ``TrainConfig``."""

    resources: Resources
    fewest_workers: int | None
    failures_survived: int


def trainer_of(worker: Callable[[dict[str, Any]], Any], arguments: Mapping[str, Any], spread: Spread) -> TorchTrainer:
    """Ray Train for ``worker``, which every worker calls with ``arguments`` and its number of ``threads``."""
    resources, fewest_workers, failures_survived = spread
    workers, gpus = resources.workers or 1, resources.gpus_per_worker
    cpus = resources.cpus_per_worker or cpus_of_a_worker(workers, gpus)
    own = GPU_VARIABLES | tokenizing_threads(cpus) if gpus > 0 else GLIBC_KEEPS_MEMORY
    return TorchTrainer(
        worker,
        train_loop_config={**arguments, "threads": max(1, int(cpus))},
        scaling_config=ScalingConfig(
            num_workers=workers if fewest_workers is None else (fewest_workers, workers),
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": cpus} | ({"GPU": gpus} if gpus > 0 else {}),
        ),
        torch_config=(_OneMachine if _is_one_machine() else TorchConfig)(backend="nccl" if gpus > 0 else "gloo"),
        run_config=RunConfig(
            # Checkpoints are ours; a new name keeps Ray Train from going on with a state of its own
            name=f"attempt-{uuid.uuid4().hex[:8]}",
            storage_path=f"{arguments['settings'].output}/ray-train",
            failure_config=FailureConfig(max_failures=failures_survived),
            callbacks=[EndAtMistakes()],
            worker_runtime_env={"env_vars": own | (_LOOPBACK if _is_one_machine() else {})},
        ),
    )


@ray.remote(num_cpus=0, max_calls=1)  # type: ignore[untyped-decorator]
def log_estimate(stage: Stage[Any], gpus: str, board: Any) -> None:
    """What the run takes on its GPUs, as far as it can be said. ``gpus``: which they are.

    In a process of its own, as an estimate replaces functions of torch and transformers for all of its process.
    """
    from trainers.estimate.recipe import estimate_of_run

    with log_to(board.actor.put_nowait.remote):
        try:
            log.info(f"  {estimate_of_run(stage, gpus)}")
        except Exception as error:  # which is none of training's
            log.info(f"  what a step takes can't be estimated: {type(error).__name__}: {error}")


def train_on_worker(arguments: dict[str, Any]) -> str:
    """What each worker does: the run, and on the first rank its record and the export.

    Returns JSON: on the first rank the shard's ``record``, or of a single worker the ``error`` for the user.
    """
    settings, board = arguments["settings"], arguments["board"]
    torch.set_num_threads(arguments["threads"])
    context, device = ray.train.get_context(), get_device()
    is_first = context.get_world_rank() == 0
    own: list[Callback] = [RayMetrics(settings.output), RelayedProgress(board)] if is_first else []
    try:
        # what concerns the run is logged by all ranks alike and shown once, and warnings of storage by any
        level = logging.INFO if is_first else logging.WARNING
        with log_to(board.actor.put_nowait.remote, level):
            callbacks = [*own, RayCheckpoints()]
            record = recorded_training(settings, arguments["derivation"], device, callbacks, is_first=is_first)
    except UserError as error:
        if context.get_world_size() > 1:
            raise  # others may wait for this rank, and Ray Train stops them; where one returns, it waits with them
        return json.dumps({"error": str(error)})
    return json.dumps({"record": asdict(record)} if record else {})


class RayCheckpoints(Callback):
    """Announces every checkpoint to Ray Train, which wants to hear of it from all ranks."""

    def on_checkpoint(self, steps: int) -> None:
        """The steps done."""
        ray.train.report({"step": steps})


class RelayedProgress(Callback):
    """Posts steps for the progress line of the driver."""

    def __init__(self, board: Queue) -> None:
        self._board = board

    def on_step(self, point: Mapping[str, Any]) -> None:
        """The whole point."""
        actor = self._board.actor
        assert actor is not None  # until the driver shuts it down
        actor.put_nowait.remote(dict(point))


class RayMetrics(Callback):
    """Ray's metrics of the run whose model goes to ``output``, by its first rank."""

    def __init__(self, output: str) -> None:
        self._metrics = StageMetrics(output)
        self._negatives: float | None = None

    def on_start(self, ledger: Mapping[str, Any]) -> None:
        """What is constant over the run."""
        self._negatives = negatives_per_query(ledger)

    def on_step(self, point: Mapping[str, Any]) -> None:
        """One step. Gauges are set by every step, because Ray forgets one that is not set for some time."""
        record = self._metrics.record
        record(EXAMPLES, point["examples"])
        record(TOKENS, point["tokens"])
        record(SECONDS, point["seconds"])
        record(WAITING_SECONDS, point["waiting_seconds"])
        record(STEP_SECONDS, point["seconds"])
        record(LOSS, point["loss"])
        record(LEARNING_RATE, point["learning_rate"])
        if self._negatives is not None:
            record(NEGATIVES, self._negatives)


def outcome_of(fit: Callable[[], Any], board: Queue, progress: ProgressLine) -> ShardRecord:
    """What ``fit`` gives, in a thread of its own, while what is on ``board`` is shown. Raises as ``_record``."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = fit()
        except BaseException as error:  # handed to the main thread, which raises it
            outcome["raised"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    shown = ShownProgress(progress)
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        for item in board.get_nowait_batch(board.size()):
            if isinstance(item, logging.LogRecord):
                log.handle(item)
                continue
            shown.on_step(item)
    board.shutdown(force=True)
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
