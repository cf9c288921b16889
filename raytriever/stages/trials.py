"""The trials of a sweep on Ray: groups of stages side by side, each in its own task, with their log at the driver."""

import logging
import traceback
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from raytriever.errors import UserError
from raytriever.reports.log import log, log_to
from raytriever.stages.ray_session import RaySession, open_board
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Stage, Stages
from raytriever.sweep.plan import StageGroup
from raytriever.sweep.results import Failure

_POLL_SECONDS = 0.5


@ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")  # type: ignore[untyped-decorator]  # its stages take CPUs
def _make_group(name: str, stages: Stages, recipe: str, board: Any, folder: str) -> Failure | None:
    """Makes a group's stages of ``recipe``, as if in the driver's current ``folder``; what goes wrong is returned."""
    here = chdir(folder) if Path(folder).is_dir() else nullcontext()

    def post(record: logging.LogRecord) -> None:
        record.msg = f"{name}: {record.msg.strip()}"
        board.put_nowait(record)  # waits: the driver reads the board once more when the task has ended

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


def make_groups(groups: Sequence[StageGroup], concurrent: int, recipe: str) -> dict[str, Failure]:
    """Makes groups of ``recipe`` that don't need one another, ``concurrent`` at a time.

    Returns what failed, by name.
    """
    board = open_board()
    folder = str(Path.cwd())
    waiting, running, failures = list(groups), dict[Any, str](), dict[str, Failure]()
    while waiting or running:
        while waiting and len(running) < concurrent:
            group = waiting.pop(0)
            stages = {name: _with_share(stage, concurrent) for name, stage in group.stages.items()}
            running[_make_group.remote(group.name, stages, recipe, board, folder)] = group.name
        finished, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
        for record in board.get_nowait_batch(board.size()):
            log.handle(record)
        for answer in finished:
            name = running.pop(answer)
            try:
                failure = ray.get(answer)
            except ray.exceptions.RayError as error:
                failure = Failure(f"the trial's process was lost ({error})")
            if failure:
                failures[name] = failure
                log.info(f"{name}: failed: {failure.reason}")
    return failures


def _with_share(stage: Stage[Any], concurrent: int) -> Stage[Any]:
    """Gives training an even share of the CPUs if trials run side by side, unless its settings say how many."""
    resources = stage.config.resources
    if concurrent == 1 or stage.command != "train" or resources.cpus_per_worker is not None:
        return stage
    share = ray.cluster_resources().get("CPU", 1) / concurrent
    resources = resources.model_copy(update={"cpus_per_worker": max(1, int(share // (resources.workers or 1)))})
    return type(stage)(stage.config.model_copy(update={"resources": resources}))
