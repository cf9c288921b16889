"""Ray Train around the plain loop, for several workers: starts them, and brings back the record or the error."""

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, UserCallback, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import StorageError, UserError, first_line
from raytriever.stages.ray_session import session_folder
from trainers.engine.callback import Callback
from trainers.jobs.worker import Spread, returned_to_driver, run_on_worker, size_of_worker

# Interfaces for the ranks of one machine: they ask for no token, so nobody else may reach them
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _is_one_machine() -> bool:
    """Whether Ray is this command's own, or this process's on one node; a cluster may get more while workers start."""
    return sys.platform == "linux" and not os.environ.get("RAY_ADDRESS") and len(ray.nodes()) == 1


class _OneMachine(TorchConfig):  # type: ignore[misc]
    """A process group that meets at a file of this user's alone.

    PyTorch's default store listens on all of the machine's addresses and lets anybody write.
    """

    @property
    def backend_cls(self) -> type[Any]:
        """The class that starts the process group."""
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


def trainer_of(worker: Callable[[dict[str, Any]], Any], arguments: Mapping[str, Any], spread: Spread) -> TorchTrainer:
    """Ray Train for ``worker``, which every worker calls with ``arguments`` and its number of ``threads``."""
    resources, fewest_workers, failures_survived, _ = spread
    workers, gpus = resources.workers or 1, resources.gpus_per_worker
    cpus, own = size_of_worker(spread)
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


def fit_on_workers(arguments: Mapping[str, Any], spread: Spread) -> str:
    """The result of a run of several workers under Ray Train.

    Raises ``UserError`` where one of them refused the run, and where the controller has died.
    """
    try:
        return str(trainer_of(train_on_worker, arguments, spread).fit().return_value)
    except ray.exceptions.RayActorError as error:
        raise UserError(
            f"Ray Train's controller, a process on this machine, has died ({first_line(error)})."
            " Checkpoints are kept. Run the same command again to resume from the last one."
        ) from error
    except (ControllerError, WorkerGroupError) as error:
        refused = refusal_of(error)
        if refused is None:
            raise
        raise UserError(str(refused)) from error


def train_on_worker(arguments: dict[str, Any]) -> str:
    """The work of each worker: the run. Returns ``returned_to_driver``.

    Raises what several workers refuse. Others may wait for this rank, and Ray Train stops them. If one returned, it
    would wait with them.
    """
    context, device = ray.train.get_context(), get_device()

    def run() -> ShardRecord | None:
        return run_on_worker(arguments, device, context.get_world_rank(), [RayCheckpoints()])

    if context.get_world_size() == 1:
        return returned_to_driver(run)
    record = run()
    return returned_to_driver(lambda: record)


class RayCheckpoints(Callback):
    """Announces every checkpoint to Ray Train, which wants to hear of it from all ranks."""

    def on_checkpoint(self, steps: int) -> None:
        """The steps done."""
        ray.train.report({"step": steps})


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
    """A worker's refusal, if that is why Ray Train ended the run with ``raised``. Otherwise None."""
    ended_by: list[Exception] = []
    if isinstance(raised, ControllerError):
        ended_by = [raised.controller_failure]
    elif isinstance(raised, WorkerGroupError):
        ended_by = [error for _, error in sorted(raised.worker_failures.items())]
    return next((error for error in ended_by if isinstance(error, UserError)), None)
