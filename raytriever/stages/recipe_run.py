"""Running stages: one, or those of a recipe, checked before the first of them begins."""

import dataclasses
import os
import platform
import resource
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from raytriever.artifacts.artifact import Artifact, is_artifact, read_run
from raytriever.artifacts.storage import Folder, storage_errors
from raytriever.artifacts.writer import ArtifactWriter, locked
from raytriever.command_line import echo
from raytriever.errors import UserError
from raytriever.jobs import stage_class
from raytriever.reports.log import SUBMITTED, log, log_fields
from raytriever.reports.progress import ProgressLine, format_seconds
from raytriever.settings.configuration import input_paths, map_inputs, validate
from raytriever.settings.recipe import Recipe
from raytriever.stages.metrics import StageMetrics, stage_labels
from raytriever.stages.ray_session import RaySession, check_output
from raytriever.stages.stage import Stage, Stages, made_by

_OF_NODES = "This command was submitted, so it sees files of the nodes, not of the machine that submitted it."


def recipe_stages(recipe: Recipe) -> dict[str, Stage[Any]]:
    """Every stage of a recipe, its settings checked, by name; nothing is read or written. Raises ``UserError``."""
    stages = {}
    for name, settings in recipe.stages.items():
        where = f"Recipe {recipe.name}, stage {name}"
        stage = stage_class(settings.get("job", "(none)"), where)
        values = {key: value for key, value in settings.items() if key != "job"} | {"output": recipe.folder(name)}
        config = validate(stage.config_class, values, where, [name])

        def resolve(key: str, value: str, stage_name: str = name) -> str:
            return recipe.resolve_input(stage_name, key, value)

        stages[name] = stage(map_inputs(config, resolve))
    return stages


def check_before_run(stages: Stages, names: Iterable[str]) -> set[str]:
    """Checks the stages of these ``names``: their settings, and the inputs that come from outside the run.

    Returns the finished stages that will be reused. These were checked when they were made. Raises ``UserError``.
    """
    finished: set[str] = set()
    for name in names:
        with _naming(name):
            check_output(stages[name].config.output)
            makers = _makers(stages[name], stages)
            for key in (key for key, maker in makers.items() if maker is stages[name]):
                raise UserError(
                    f"{key} lies in the output, {stages[name].config.output}, which is emptied before anything is made"
                    " in it. Choose another output."
                )
            if all(maker is None or maker in map(stages.get, finished) for maker in makers.values()):
                with suppress(UserError):  # raised again when the stage is to be made
                    if is_finished(stages[name]):
                        finished.add(name)
                        continue
            stages[name].check_settings(stages)
            try:
                stages[name].check_inputs({key for key, maker in makers.items() if maker is None})
            except UserError as error:
                if SUBMITTED in os.environ and "://" not in str(error):
                    error.args = (f"{error} {_OF_NODES}",)
                raise
    return finished


def is_finished(stage: Stage[Any]) -> bool:
    """Whether the artifact exists and was made with these settings from these inputs, which exist too."""
    output = stage.config.output
    return is_artifact(output) and ArtifactWriter(output, stage.derivation(), replace=True).complete


@contextmanager
def _naming(stage: str) -> Iterator[None]:
    """Puts the stage's name before a ``UserError``, because its settings' keys begin with it."""
    try:
        yield
    except UserError as error:
        error.args = (f"{stage}: {error}",)
        raise


def _makers(stage: Stage[Any], stages: Stages) -> dict[str, Stage[Any] | None]:
    """For the dotted key of each input of ``stage``, the stage of the run that makes it, or None."""
    return {key: made_by(stages, path) for key, path in input_paths(stage.config).items()}


def run_recipe(
    stages: Stages,
    names: Sequence[str],
    recipe: str,
    folder: str,
    *,
    force: bool = False,
    shards_here: bool | None = None,
) -> None:
    """Makes the stages of these ``names`` of ``recipe`` in its ``folder``, then reports the results.

    All are checked before the first begins. A later stage's inputs are checked as soon as they are made. If one is to
    be made, no other run may begin in ``folder``, or this one would go on with that one's artifacts. ``force`` is as in
    ``run_stage``, and ``shards_here`` as in ``RaySession``.
    """
    reused = check_before_run(stages, names)
    makers = {name: _makers(stages[name], stages) for name in names}
    finished: list[tuple[Stage[Any], Artifact]] = []
    with (
        nullcontext() if reused.issuperset(names) else locked(Folder(folder), force=force),
        RaySession(shards_here=shards_here) as session,
    ):
        for name in names:
            stage = stages[name]
            with _naming(name):
                artifact = run_stage(stage, session, replace=True, force=force, label=name, recipe=recipe)
            finished.append((stage, artifact))
            for later in names:
                if later not in reused and (made := {key for key, maker in makers[later].items() if maker is stage}):
                    with _naming(later):
                        stages[later].check_inputs(made)
    for line in closing_lines(finished):
        echo(line)


def closing_lines(stages: Sequence[tuple[Stage[Any], Artifact]]) -> list[str]:
    """The lines at the end: every stage's, then where results are. A table replaces the lines of its inputs."""
    gathered = {path for stage, _ in stages if stage.shows_inputs for path in input_paths(stage.config).values()}
    gathered |= {
        path for stage, _ in stages if stage.config.output in gathered for path in input_paths(stage.config).values()
    }
    shown = [(stage, artifact) for stage, artifact in stages if stage.config.output not in gathered]
    lines = [line for stage, artifact in shown for line in stage.announce(artifact)]
    for stage, artifact in shown:
        lines += [f"  {artifact.kind:10} {artifact.folder.describe(name)}" for name in stage.results]
    return lines


def run_stage(
    stage: Stage[Any],
    session: RaySession,
    *,
    replace: bool = False,
    force: bool = False,
    label: str = "",
    recipe: str | None = None,
) -> Artifact:
    """Makes the stage's artifact, or reuses an existing one. Finished shards of an interrupted run are kept.

    ``replace`` removes a different artifact first. One that another ``recipe`` made is refused with a ``UserError``.
    ``force`` takes over a lock of another machine's run.
    """
    label = label or stage.command
    output = stage.config.output
    check_output(output)
    with log_fields(**stage_labels(output)), storage_errors(output):
        for path in input_paths(stage.config).values():
            if is_artifact(path):
                Artifact(path).check()
        writer = ArtifactWriter(output, stage.derivation(), replace=replace)
        if writer.complete:
            writer.sweep()
            artifact = Artifact(output)
            artifact.check()
            log.info(f"{label}: reused, {stage.summary(artifact)} ({output})")
            return artifact
        started, metrics = time.monotonic(), StageMetrics(output)
        stage.check_inputs(input_paths(stage.config).keys())
        shards = stage.plan()
        if writer.differences:
            _require_own_recipe(output, recipe)
        with writer.making(force=force) as finished:
            if writer.differences:
                more = f", and {len(writer.differences) - 1} more" if len(writer.differences) > 1 else ""
                log.info(f"{label}: made again, the old artifact is removed ({writer.differences[0]}{more})")
            shards = [dataclasses.replace(shard, derivation=writer.derivation.digest) for shard in shards]
            if finished:
                log.info(f"{label}: {len(finished)} of {len(shards)} shards are finished already")
            with ProgressLine(label, stage.total_rows(), stage.unit, stage.reads()) as progress:
                progress.start_at(sum(record.rows for record in finished.values()))
                for phase in sorted({shard.phase for shard in shards}):
                    pending = [shard for shard in shards if shard.phase == phase and shard.name not in finished]
                    for record in stage.execute(pending, session, progress) if pending else ():
                        finished[record.name] = record
                        metrics.record_shard(record)
            records = [finished[shard.name] for shard in shards if not shard.intermediate]
            seconds = time.monotonic() - started
            artifact = writer.finish(records, stage.facts(records), _run_facts(seconds, recipe))
        log.info(f"{label}: {stage.summary(artifact)} in {format_seconds(seconds)} ({output})")
    return artifact


def _run_facts(seconds: float, recipe: str | None) -> dict[str, Any]:
    """``run.json`` of an artifact that this process has just made. ``recipe`` is None for a single job."""
    return {
        "recipe": recipe,
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "driver_peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _require_own_recipe(output: str, recipe: str | None) -> None:
    """Raises ``UserError`` where another recipe made the artifact that is to be replaced."""
    maker = read_run(Folder(output)).get("recipe")
    if recipe is not None and maker is not None and maker != recipe:
        raise UserError(
            f"{output} was made by the recipe {maker}, and {recipe} would remove it. Choose another --output, or delete"
            " the folder if you don't need it."
        )
