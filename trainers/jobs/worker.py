"""A training run as one worker makes it, and Ray's task for a run of a single worker, which needs no Ray Train."""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import ray
import torch

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import UserError, first_line
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
from raytriever.stages.placement import cpus_of_a_worker, require_room, tokenizing_threads
from raytriever.stages.stage import Resources
from retrieval.encoders.attention import KEEPS_MEMORY
from trainers.engine.callback import Callback
from trainers.record.ledger import negatives_per_query
from trainers.training_run import ShownProgress, recorded_training

_POLL_SECONDS = 0.2

# Every step has other shapes, which CUDA's allocator by itself leaves in pieces; and cuBLAS needs a workspace of its
# own for each stream where equal runs are to give equal bits (training.deterministic).
GPU_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Spread(NamedTuple):
    """Over how many workers, and how many losses of workers a run survives; see ``TrainConfig``.

    ``is_alone``: on a machine that no other joins.
    """

    resources: Resources
    fewest_workers: int | None
    failures_survived: int
    is_alone: bool = False


def run_on_worker(
    arguments: Mapping[str, Any], device: torch.device, rank: int = 0, callbacks: Sequence[Callback] = ()
) -> ShardRecord | None:
    """The work of each worker: the run on ``device``, and on the first rank its record and the export.

    ``callbacks`` are those of any rank. Raises ``UserError``.
    """
    settings, board, is_first = arguments["settings"], arguments["board"], rank == 0
    torch.set_num_threads(arguments["threads"])
    if is_first:
        callbacks = [RayMetrics(settings.output), RelayedProgress(board), *callbacks]
    # what concerns the run is logged by all ranks alike and shown once, and warnings of storage by any
    with log_to(board.post.remote, logging.INFO if is_first else logging.WARNING):
        return recorded_training(settings, arguments["derivation"], device, callbacks, is_first=is_first)


def returned_to_driver(run: Callable[[], ShardRecord | None]) -> str:
    """The result of ``run`` as JSON: on the first rank the shard's ``record``, or the ``error`` for the user."""
    try:
        record = run()
    except UserError as error:
        return json.dumps({"error": str(error)})
    return json.dumps({"record": asdict(record)} if record else {})


def size_of_worker(spread: Spread) -> tuple[float, dict[str, str]]:
    """The number of CPUs of each worker, and the variables of its process. Raises ``UserError`` as ``require_room``."""
    workers, gpus = spread.resources.workers or 1, spread.resources.gpus_per_worker
    cpus = spread.resources.cpus_per_worker or cpus_of_a_worker(workers, gpus)
    require_room(cpus, gpus, spread.fewest_workers or workers, is_alone=spread.is_alone)
    return cpus, GPU_VARIABLES | tokenizing_threads(cpus) if gpus > 0 else KEEPS_MEMORY


def fit_alone(arguments: Mapping[str, Any], spread: Spread) -> str:
    """The result of the run of a single worker. Ray restarts its process if it is lost."""
    gpus = spread.resources.gpus_per_worker
    cpus, variables = size_of_worker(spread)
    task = train_alone.options(
        num_cpus=cpus,
        num_gpus=gpus,
        max_retries=spread.failures_survived,
        retry_exceptions=True,
        runtime_env={"env_vars": variables},
    )
    run = task.remote({**arguments, "threads": max(1, int(cpus))}, "cuda:0" if gpus > 0 else "cpu")
    try:
        return str(ray.get(run))
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise UserError(
            f"The worker was killed more often than failures_survived ({spread.failures_survived}), mostly because"
            f" memory ran out ({first_line(error)}). Checkpoints are kept. Run the same command again to"
            " resume from the last one; objective.chunk_tokens makes a step smaller."
        ) from error


@ray.remote(max_calls=1)  # type: ignore[untyped-decorator]
def train_alone(arguments: dict[str, Any], device: str) -> str:
    """The run on ``device``: ``returned_to_driver``."""
    return returned_to_driver(lambda: run_on_worker(arguments, torch.device(device)))


class RelayedProgress(Callback):
    """Posts steps for the progress line of the driver."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def on_step(self, point: Mapping[str, Any]) -> None:
        """The whole point."""
        self._board.post.remote(dict(point))


class RayMetrics(Callback):
    """Ray's metrics of the run that makes ``output``, recorded by its first rank."""

    def __init__(self, output: str) -> None:
        self._metrics = StageMetrics(output)
        self._negatives: float | None = None

    def on_start(self, ledger: Mapping[str, Any]) -> None:
        """Records the constants of the run."""
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


def outcome_of(fit: Callable[[], str], board: Any, progress: ProgressLine) -> ShardRecord:
    """The record that ``fit`` returns, in a thread of its own, while what is on ``board`` is shown.

    Raises what ``fit`` raises, and ``UserError`` for an error that it returns.
    """
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
        for item in ray.get(board.take.remote()):
            if isinstance(item, logging.LogRecord):
                log.handle(item)
            else:
                shown.on_step(item)
    ray.kill(board)
    if "raised" in outcome:
        raise outcome["raised"]
    returned = json.loads(outcome["result"])
    if "error" in returned:
        raise UserError(returned["error"])
    return ShardRecord.from_json(returned["record"])
