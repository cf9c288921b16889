"""Ray Tune around the stages of a sweep: each portion is a trial, run on the cluster, its lines shown by the driver."""

import logging
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from raytriever.errors import UserError
from raytriever.reports.log import log, log_to
from raytriever.stages.ray_session import RaySession
from raytriever.stages.run import run_stage
from raytriever.stages.stage import Stage
from raytriever.sweep.budgets import Portion, Stages
from raytriever.sweep.results import Failure

_POLL_SECONDS = 0.5

_QUIET_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # an interrupt is ours: finished stages are kept, and the same command goes on
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


@ray.remote(num_cpus=0)
class _Board:
    """Where trials post their log records, and the driver reads them."""

    def __init__(self) -> None:
        self._posted: list[logging.LogRecord] = []

    def post(self, record: logging.LogRecord) -> None:
        self._posted.append(record)

    def take(self) -> list[logging.LogRecord]:
        posted, self._posted = self._posted, []
        return posted


class _Narrator(TrialProgressCallback):  # type: ignore[misc]
    """Shows what the trials posted, in place of Tune's own words."""

    def __init__(self, board: Any) -> None:
        super().__init__()
        self._board = board
        self._shown = 0.0

    def log_result(self, trial: Any, result: Any, error: bool = False) -> None:
        """Tune would print it."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tune would print it."""

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:  # noqa: ARG002
        if time.monotonic() - self._shown > _POLL_SECONDS:
            self.show()

    def show(self) -> None:
        for record in ray.get(self._board.take.remote()):
            log.handle(record)
        self._shown = time.monotonic()


# A task of its own, because Tune confines what a trial's own process starts to the resources that the trial reserved.
# It takes no CPU from its stages, and its process serves the next trial, too.
@ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")  # type: ignore[untyped-decorator]
def _make_portion(name: str, stages: Stages, recipe: str, board: Any, folder: str) -> Failure | None:
    """Makes a portion's stages of ``recipe``, as if in the driver's current ``folder``; what goes wrong is returned."""
    here = chdir(folder) if Path(folder).is_dir() else nullcontext()

    def post(record: logging.LogRecord) -> None:
        record.msg = f"{name}: {record.msg.strip()}"
        board.post.remote(record)

    with here, log_to(post), RaySession() as session:
        try:
            for stage_name, stage in stages.items():
                run_stage(stage, session, replace=True, label=stage_name, recipe=recipe)
        except UserError as error:
            return Failure(str(error))
        except Exception as error:
            last = [line for line in str(error).splitlines() if line.strip()][-1:]
            return Failure(": ".join([type(error).__name__, *last]), traceback.format_exc())
    return None


def make_portions(portions: Sequence[Portion], concurrent: int, recipe: str) -> dict[str, Failure]:
    """Makes portions of ``recipe`` that don't need one another, ``concurrent`` at a time.

    Returns what failed, by name.
    """
    os.environ.update(_QUIET_ENVIRONMENT)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the files that its own loggers would have written
    narrator = _Narrator(_Board.remote())  # type: ignore[attr-defined]
    by_name = {portion.name: _sharing_cpus(portion.stages, concurrent) for portion in portions}
    with tempfile.TemporaryDirectory(prefix="raytriever-sweep-") as folder:
        # Tune's own processes only watch: they stay on this machine, whose disk holds their notes
        here = tune.PlacementGroupFactory([{f"node:{ray.util.get_node_ip_address()}": 0.001}])
        trainable = tune.with_parameters(
            _watch, by_name=by_name, recipe=recipe, board=narrator._board, folder=str(Path.cwd())
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, here),
            param_space={"portion": tune.grid_search(list(by_name))},
            tune_config=tune.TuneConfig(max_concurrent_trials=concurrent, reuse_actors=True),
            run_config=tune.RunConfig(name="sweep", storage_path=folder, verbose=0, callbacks=[narrator]),
        )
        results = tuner.fit()
    narrator.show()
    failures = {}
    for result in results:
        name = result.config["portion"]
        failure = (
            Failure(f"the trial's process was lost ({result.error})") if result.error else result.metrics["failure"]
        )
        if failure:
            failures[name] = failure
            log.info(f"{name}: failed: {failure.reason}")
    return failures


def _watch(config: dict[str, Any], by_name: dict[str, Stages], recipe: str, board: Any, folder: str) -> None:
    name = config["portion"]
    tune.report({"failure": ray.get(_make_portion.remote(name, by_name[name], recipe, board, folder))})


def _sharing_cpus(stages: Stages, concurrent: int) -> Stages:
    """Where trials run side by side, training takes an even share of the CPUs unless it is told how many."""
    cpus = ray.cluster_resources().get("CPU", 1)
    return {name: _with_share(stage, cpus / concurrent) for name, stage in stages.items()} if concurrent > 1 else stages


def _with_share(stage: Stage[Any], share: float) -> Stage[Any]:
    resources = stage.config.resources
    if stage.command != "train" or resources.cpus_per_worker is not None:
        return stage
    resources = resources.model_copy(update={"cpus_per_worker": max(1, int(share // (resources.workers or 1)))})
    return type(stage)(stage.config.model_copy(update={"resources": resources}))
