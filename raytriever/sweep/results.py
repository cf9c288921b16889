"""What came out of a sweep: one result a trial, one row a setting, several seeds of a setting taken together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from raytriever.stages.stage import Stage
from raytriever.sweep.plan import Trial, Values

_EVALUATE = "evaluate"  # the job whose results are compared


@dataclass(frozen=True)
class Column:
    """A measure of one system, read from the evaluation that the stage ``evaluation`` makes."""

    evaluation: str
    system: str
    measure: str


@dataclass(frozen=True)
class Result:
    """One trial. ``seconds`` are of all stages of its own, with start-up; of a resumed one, the last attempt's.

    ``failure``: why it has no measures.
    """

    name: str
    values: Values
    measures: Mapping[Column, float]
    seconds: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1; None of fewer than two) over the seeds that finished."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Row:
    """One setting: the swept ``values`` without the seed, and its trials, one a seed."""

    values: Values
    results: Sequence[Result]

    @property
    def finished(self) -> list[Result]:
        """The trials that have measures."""
        return [result for result in self.results if result.failure is None]

    def spread(self, column: Column) -> Spread | None:
        """Over seeds; None where no trial finished."""
        values = [result.measures[column] for result in self.finished]
        if not values:
            return None
        return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    @property
    def seconds(self) -> float | None:
        """Mean over the finished trials."""
        values = [result.seconds for result in self.finished if result.seconds is not None]
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class SweepResult:
    """A whole sweep: its ``settings`` (plain JSON), what is compared and the results.

    ``keys`` are the swept ones without ``seed_key``. ``test_split`` says whether a compared measure is of a split
    called "test".
    """

    recipe: str
    settings: dict[str, Any]
    keys: Sequence[str]
    seed_key: str | None
    columns: Sequence[Column]
    results: Sequence[Result]
    test_split: bool

    @property
    def rows(self) -> list[Row]:
        """One a setting, in the order of its first trial."""
        by_setting: dict[tuple[tuple[str, str], ...], list[Result]] = {}
        for result in self.results:
            setting = tuple((key, value) for key, value in result.values.items() if key != self.seed_key)
            by_setting.setdefault(setting, []).append(result)
        return [Row(dict(setting), of_setting) for setting, of_setting in by_setting.items()]

    @property
    def failed(self) -> list[Result]:
        """Trials without a result."""
        return [result for result in self.results if result.failure]

    def title(self, column: Column) -> str:
        """The measure, with its evaluation if there are several."""
        several = len({other.evaluation for other in self.columns}) > 1
        return f"{column.evaluation}: {column.measure}" if several else column.measure

    def systems(self) -> str:
        """The system that is measured."""
        return ", ".join(f"'{system}'" for system in dict.fromkeys(column.system for column in self.columns))


def choose_columns(trial: Trial, measures: Sequence[str], system: str | None) -> list[Column]:
    """The measures and systems to compare, from the recipe's evaluations. The first measure picks the best setting.

    Without ``measures``, all of an evaluation's are compared. Without ``system``, it is the first one that the swept
    values change. Raises ``UserError`` where no stage evaluates, or none has these.
    """
    evaluations = {name: stage for name, stage in trial.stages.items() if stage.command == _EVALUATE}
    if not evaluations:
        raise UserError(
            "A sweep compares evaluations, and the recipe has no stage with job: evaluate (up to --until). Add"
            " one, or give a later --until."
        )
    columns = []
    for name, stage in evaluations.items():
        chosen = system if system is not None else _changed_system(trial, stage)
        known = stage.resolved()["measures"]
        wanted = [measure for measure in measures or known if measure in known]
        columns += [Column(name, chosen, measure) for measure in wanted if chosen in stage.config.runs]
    if system is not None and not any(system in stage.config.runs for stage in evaluations.values()):
        systems = list(dict.fromkeys(run for stage in evaluations.values() for run in stage.config.runs))
        raise UserError(f"--system {system}: no evaluation has such a system.{did_you_mean(system, systems)}")
    for measure in measures:
        if measure not in {column.measure for column in columns}:
            known = list(dict.fromkeys(m for stage in evaluations.values() for m in stage.resolved()["measures"]))
            raise UserError(f"--measure {measure}: not among those evaluated.{did_you_mean(measure, known)}")
    return columns


def _changed_system(trial: Trial, evaluate: Stage[Any]) -> str:
    changed = {stage.config.output for name, stage in trial.stages.items() if trial.depends[name]}
    runs: dict[str, str] = evaluate.config.runs
    return next((name for name, path in runs.items() if path in changed), next(iter(runs)))


def read_result(trial: Trial, name: str, columns: Sequence[Column]) -> Result:
    """The result of a finished trial."""
    made = {stage: Artifact(trial.stages[stage].config.output) for stage in trial.stages}
    own = [artifact for stage, artifact in made.items() if trial.depends[stage]]
    measures = {
        column: float(made[column.evaluation].read_json("metrics.json")["means"][column.system][column.measure])
        for column in columns
    }
    return Result(name, trial.values, measures, sum(float(each.run_facts().get("seconds", 0.0)) for each in own))
