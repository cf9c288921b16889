"""The evaluations of a run, its best state, and when to stop: pure functions of evaluations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self


@dataclass(frozen=True)
class Evaluation:
    """The measures of validation after ``step`` steps, by name; ``seconds`` are wall-clock."""

    step: int
    measures: dict[str, float]
    seconds: float = 0.0


@dataclass(frozen=True)
class Criterion:
    """The measure that decides from step ``start`` on. Under a later criterion the best so far starts anew: its measure
    has another scale.
    """

    measure: str
    higher_is_better: bool
    start: int = 0

    def improves(self, value: float, best: float) -> bool:
        """Whether ``value`` beats ``best``; what is not a number is beaten by any and beats none."""
        if math.isnan(best):
            return not math.isnan(value)
        return value > best if self.higher_is_better else value < best


class DecidingValue(NamedTuple):
    """The ``value`` that decided after ``step`` steps, and the criterion that it is of."""

    step: int
    value: float
    criterion: Criterion


@dataclass(frozen=True)
class State:
    """The state of a run besides its weights: the steps done, its evaluations, and its best step."""

    steps: int
    evaluations: tuple[Evaluation, ...] = ()
    best_step: int | None = None

    @property
    def was_evaluated(self) -> bool:
        """Whether the last evaluation is of now."""
        return bool(self.evaluations) and self.evaluations[-1].step == self.steps

    def judged(self, evaluations: Sequence[Evaluation], criteria: Sequence[Criterion]) -> Self:
        """The same after these ``evaluations``."""
        best = best_evaluation(evaluations, criteria)
        return replace(self, evaluations=tuple(evaluations), best_step=best.step if best else None)


@dataclass(frozen=True)
class Trained:
    """The result of a run of ``total_steps``: its last state, and the criteria that judged its evaluations.

    With validation, it ended as it was after ``state.best_step`` steps.
    """

    total_steps: int
    state: State
    criteria: tuple[Criterion, ...] = ()

    @property
    def stopped_early(self) -> bool:
        """Whether steps were left when patience was at its end."""
        return self.state.steps < self.total_steps

    @property
    def start(self) -> dict[str, float]:
        """Measures before the first step. Empty without validation."""
        return next((evaluation.measures for evaluation in self.state.evaluations if evaluation.step == 0), {})

    @property
    def best(self) -> tuple[Evaluation, Criterion] | None:
        """The evaluation of the state that it ended as, and what made it the best; None without validation."""
        found = best_evaluation(self.state.evaluations, self.criteria)
        return None if found is None else (found, criterion_at(self.criteria, self.state.evaluations[-1].step))


def criterion_at(criteria: Sequence[Criterion], step: int) -> Criterion:
    """The criterion that decides at ``step``; ``criteria`` are in order of their starts, the first from 0 on."""
    return next(criterion for criterion in reversed(criteria) if criterion.start <= step)


def best_evaluation(evaluations: Sequence[Evaluation], criteria: Sequence[Criterion]) -> Evaluation | None:
    """The first of the best evaluations under the criterion that decides now; that before the first step is none.

    An untrained encoder is what a run is compared with, not what it may end as.
    """
    trained = [evaluation for evaluation in evaluations if evaluation.step > 0]
    if not trained:
        return None
    criterion = criterion_at(criteria, trained[-1].step)
    best: Evaluation | None = None
    for evaluation in trained:
        if evaluation.step < criterion.start:
            continue
        value = evaluation.measures[criterion.measure]
        if best is None or criterion.improves(value, best.measures[criterion.measure]):
            best = evaluation
    return best


def evaluations_without_improvement(evaluations: Sequence[Evaluation], criteria: Sequence[Criterion]) -> int:
    """Number of evaluations after the best one."""
    best = best_evaluation(evaluations, criteria)
    return 0 if best is None else sum(evaluation.step > best.step for evaluation in evaluations)


def should_stop(evaluations: Sequence[Evaluation], criteria: Sequence[Criterion], patience: int | None) -> bool:
    """Whether ``patience`` evaluations in a row have not improved on the best."""
    return patience is not None and evaluations_without_improvement(evaluations, criteria) >= patience


def deciding_values(evaluations: Sequence[Evaluation], criteria: Sequence[Criterion]) -> list[DecidingValue]:
    """The deciding value of each evaluation."""
    deciding = [(evaluation, criterion_at(criteria, evaluation.step)) for evaluation in evaluations]
    return [DecidingValue(e.step, e.measures[criterion.measure], criterion) for e, criterion in deciding]
