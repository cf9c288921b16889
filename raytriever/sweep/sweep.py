"""`raytriever sweep`: runs a recipe for several values of settings, compared in a table and a plot."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from logging import LogRecord
from typing import Annotated, Any

import typer
import yaml

from raytriever.artifacts.storage import absolute
from raytriever.command_line import OutputOption, PrintOption, RecipeArgument, SetOption, UntilOption, echo
from raytriever.errors import UserError
from raytriever.reports.log import log, log_to
from raytriever.reports.table import counted
from raytriever.settings.recipe import Recipe, load_recipe
from raytriever.stages.ray_session import RaySession, check_output
from raytriever.stages.recipe_run import check_before_run, is_finished, recipe_stages, run_stage
from raytriever.stages.stage import Stages
from raytriever.sweep.plan import (
    Axis,
    StageGroup,
    Trial,
    check_keys,
    folder_name,
    grid,
    groups_of,
    parse_axis,
    plan_trial,
)
from raytriever.sweep.report import sweep_lines, write_sweep
from raytriever.sweep.results import Column, Result, SweepResult, choose_columns, read_result


@dataclass(frozen=True)
class SweepSettings:
    """The command's arguments."""

    recipe: str
    grid: Sequence[str] = ()
    seeds: str | None = None
    set: Sequence[str] = ()
    until: str | None = None
    measures: Sequence[str] = ()
    system: str | None = None
    output: str | None = None


def sweep(
    recipe: RecipeArgument,
    grid: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B", help="May be repeated.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="KEY=1,2,3", help="Gives mean and standard deviation over the seeds.")
    ] = None,
    overrides: SetOption = None,
    until: UntilOption = None,
    measure: Annotated[
        list[str] | None, typer.Option(help="The first picks the best setting. May be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The evaluated system to compare.")] = None,
    output: OutputOption = None,
    print_config: PrintOption = False,
) -> None:
    """Runs a recipe over a grid of settings. Exits with 1 if a trial failed, after the others are done."""
    settings = SweepSettings(recipe, grid or [], seeds, overrides or [], until, measure or [], system, output)
    check_output(load_recipe(recipe, overrides or [], output).output)
    planned = plan_sweep(settings, recipe_stages)
    if print_config:
        echo(yaml.safe_dump(planned.described(), sort_keys=False, allow_unicode=True))
        return
    swept = run_sweep(planned)
    for line in [*sweep_lines(swept), *write_sweep(swept, planned.recipe.output)]:
        echo(line)
    raise typer.Exit(1 if swept.failed else 0)


@dataclass(frozen=True)
class Sweep:
    """A planned sweep: every trial's stages, checked, before anything is made."""

    settings: SweepSettings
    recipe: Recipe
    keys: list[str]
    seed_key: str | None
    trials: list[Trial]
    columns: list[Column]

    def described(self) -> dict[str, Any]:
        """The plan as text: what would be made where, for ``--print-config``."""
        made = {group.name or "once": list(group.stages) for groups in groups_of(self.trials) for group in groups}
        compared = [f"{column.evaluation}: {column.measure} of {column.system}" for column in self.columns]
        return {"output": self.recipe.output, "compared": compared, "stages": made}


def plan_sweep(settings: SweepSettings, build: Callable[[Recipe], Stages]) -> Sweep:
    """Reads and checks everything; ``build`` makes a recipe's stages. Raises ``UserError``; nothing is written."""
    axes = [parse_axis(text, "--grid") for text in settings.grid]
    seeds = [parse_axis(settings.seeds, "--seeds")] if settings.seeds else []
    _check_axes(axes, seeds, settings)

    def load(values: dict[str, str]) -> Recipe:
        overrides = [*settings.set, *(f"{key}={value}" for key, value in values.items())]
        recipe = load_recipe(settings.recipe, overrides, settings.output)
        return replace(recipe, output=absolute(recipe.output).rstrip("/"))

    recipe = load({})
    keys = [key for key, _ in axes]
    check_keys(recipe, [*keys, *(key for key, _ in seeds)], settings.until)
    values = grid([*axes, *seeds])
    trials = [plan_trial(load(of_trial), build, of_trial, settings.until) for of_trial in values]
    first, *others = (choose_columns(trial, settings.measures, settings.system) for trial in trials)
    columns = [column for column in first if all(column in other for other in others)]
    if not columns:
        raise UserError("The settings share no measure of a system, so nothing can be compared. Keep one in all.")
    return Sweep(settings, recipe, keys, seeds[0][0] if seeds else None, trials, columns)


def _check_axes(axes: Sequence[Axis], seeds: Sequence[Axis], settings: SweepSettings) -> None:
    if not axes and not seeds:
        raise UserError("A sweep needs a --grid, such as --grid model.objective.margin=0.1,0.2, or --seeds.")
    keys = [key for key, _ in (*axes, *seeds)]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"{key} is swept twice. Give all of its values in one --grid, or in --seeds.")
        if any(override.partition("=")[0] == key for override in settings.set):
            raise UserError(f"{key} is swept and set at once. Leave out one of the two.")


def run_sweep(sweep: Sweep) -> SweepResult:
    """Makes what is missing, shared stages first, and gathers the results.

    A trial that fails is a result too. Raises ``UserError`` where a stage fails that all trials share.
    """
    _check(sweep.trials)
    failures: dict[str, str] = {}  # by the group's name
    with RaySession() as session:
        for groups in groups_of(sweep.trials):
            missing = _missing(groups, sweep.trials, failures)
            if missing and missing[0].values:
                stages = ", ".join(dict.fromkeys(name for group in missing for name in group.stages))
                log.info(f"{counted(len(missing), 'setting')} of {stages} to make")
            for group in missing:
                try:
                    _make(group, session, sweep.recipe.name)
                except Exception as error:
                    if not group.values:
                        raise
                    failures[group.name] = _reason(error)
                    log.info(f"{group.name}: failed: {failures[group.name]}")
    results = [_result(sweep.columns, trial, failures) for trial in sweep.trials]
    settings = {key: value for key, value in asdict(sweep.settings).items() if value not in (None, [], ())}
    judged = [trial.stages[column.evaluation].config for trial in sweep.trials for column in sweep.columns]
    on_test = any(config.collection and config.split == "test" for config in judged)
    return SweepResult(sweep.recipe.name, settings, sweep.keys, sweep.seed_key, sweep.columns, results, on_test)


def _make(group: StageGroup, session: RaySession, recipe: str) -> None:
    for name, stage in group.stages.items():
        label = f"{group.name}: {name}" if group.name else name
        run_stage(stage, session, replace=True, label=label, recipe=recipe)


def _reason(error: Exception) -> str:
    """A sentence. Of what no user caused, where it arose is logged."""
    if isinstance(error, UserError):
        return str(error)
    log.info(traceback.format_exc())
    last = [line for line in str(error).splitlines() if line.strip()][-1:]
    return ": ".join([type(error).__name__, *last])


def _check(trials: Sequence[Trial]) -> None:
    """Every stage of the sweep, each once."""
    checked: set[str] = set()
    said: dict[str, LogRecord] = {}
    with log_to(lambda record: said.setdefault(record.getMessage(), record)):
        for trial in trials:
            for group in trial.groups().values():
                new = [name for name, stage in group.stages.items() if stage.config.output not in checked]
                check_before_run(trial.stages, new)
                checked |= {group.stages[name].config.output for name in new}
    for record in said.values():  # what trials share is warned of once
        log.handle(record)


def _missing(groups: Sequence[StageGroup], trials: Sequence[Trial], failures: dict[str, str]) -> list[StageGroup]:
    """The groups to make: not the finished ones, nor those that need a failed one."""
    failed = [group for groups in groups_of(trials) for group in groups if group.name in failures]
    missing = []
    for group in groups:
        if any(other.is_part_of(group) for other in failed):
            continue
        if group.values and all(is_finished(stage) for stage in group.stages.values()):
            log.info(f"{group.name}: reused")
        else:
            missing.append(group)
    return missing


def _result(columns: Sequence[Column], trial: Trial, failures: dict[str, str]) -> Result:
    name = folder_name(trial.values, list(trial.values))
    failure = next((failures[p.name] for p in trial.groups().values() if p.name in failures), None)
    return Result(name, trial.values, {}, failure=failure) if failure else read_result(trial, name, columns)
