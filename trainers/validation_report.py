"""What the report says of validation: the measures over the run, its best state and what that took."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytriever.retrieval.curve_plots import Curve, Panel, curve_panels
from raytriever.retrieval.progress import format_seconds
from raytriever.retrieval.report import Block, Cell, Plot, Table
from raytriever.trainers.early_stopping import (
    Criterion,
    Evaluation,
    best_evaluation,
    criterion_at,
    evaluations_without_improvement,
)

Points = Sequence[Mapping[str, Any]]

_MOST_PANELS = 8


def validation_blocks(
    evaluations: Sequence[Evaluation], criteria: Sequence[Criterion], points: Points, log: Points
) -> list[Block]:
    """A panel for each measure with the best state marked, and a table of its start, best and end."""
    best = best_evaluation(evaluations, criteria)
    decisive = criterion_at(criteria, evaluations[-1].step).measure
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.measures))
    names.sort(key=lambda name: name != decisive)
    marked = best.step if best else None
    panels = []
    for name in names[:_MOST_PANELS]:
        having = [evaluation for evaluation in evaluations if name in evaluation.measures]
        steps = np.array([evaluation.step for evaluation in having], dtype=np.int64)
        values = np.array([evaluation.measures[name] for evaluation in having], dtype=np.float64)
        panels.append(Panel(name, [Curve(name, steps, values)], smoothed=False, dots=True, marked=marked))
    caption = "Measures of validation by the steps done."
    if best:
        caption += f" Orange: step {best.step:,}, the best by {decisive}, whose weights are the model's."
    if len(names) > _MOST_PANELS:
        caption += f" {len(names) - _MOST_PANELS} more measures are in the table."
    return [
        Plot(curve_panels(panels, "Validation"), caption),
        _table(evaluations, best, names, points, log),
    ]


def _table(
    evaluations: Sequence[Evaluation], best: Evaluation | None, names: Sequence[str], points: Points, log: Points
) -> Table:
    first, last = evaluations[0], evaluations[-1]
    shown = [(_when("start" if first.step == 0 else "first", first), first)]
    if best:
        shown.append((_when("best", best), best))
    if last is not first and last is not best:
        shown.append((_when("last", last), last))
    rows: list[list[str | Cell]] = [
        [name, *(_value(evaluation, name, evaluation is best) for _, evaluation in shown)] for name in names
    ]
    rows.append(["examples seen", *(f"{_sum(points, 'examples', evaluation.step):,.0f}" for _, evaluation in shown)])
    if log:
        times = [_sum(log, "seconds", evaluation.step) for _, evaluation in shown]
        rows.append(["time in training", *map(format_seconds, times)])
    if any(evaluation.seconds for evaluation in evaluations):
        times = [sum(e.seconds for e in evaluations if e.step <= evaluation.step) for _, evaluation in shown]
        rows.append(["time in validation", *map(format_seconds, times)])
    caption = f"{len(evaluations):,} evaluations."
    return Table(["measure", *(title for title, _ in shown)], rows, caption)


def _when(title: str, evaluation: Evaluation) -> str:
    return f"{title} (step {evaluation.step:,})"


def _value(evaluation: Evaluation, name: str, is_best: bool) -> str | Cell:
    if name not in evaluation.measures:
        return "not measured"
    return Cell(f"{evaluation.measures[name]:.4f}", is_strong=is_best)


def _sum(points: Points, name: str, step: int) -> float:
    return float(sum(point[name] for point in points if point["step"] <= step))


def validation_sentence(
    evaluations: Sequence[Evaluation],
    criteria: Sequence[Criterion],
    points: Points,
    log: Points,
    planned_steps: int | None,
) -> str:
    """Start, best and end in words, what the best took, and whether the run was stopped there."""
    best, last = best_evaluation(evaluations, criteria), evaluations[-1]
    if best is None:
        return ""
    name = criterion_at(criteria, last.step).measure
    took = f"{_sum(points, 'examples', best.step):,.0f} examples"
    if log:
        took += f" and {format_seconds(_sum(log, 'seconds', best.step))} of training"
    parts = []
    if evaluations[0].step == 0 and name in evaluations[0].measures:
        parts.append(f"{evaluations[0].measures[name]:.4f} before the first step")
    parts.append(f"{best.measures[name]:.4f} at its best, step {best.step:,} (after {took})")
    if last is not best:
        parts.append(f"{last.measures[name]:.4f} at the end")
    sentence = f"In validation, {name} is {', '.join(parts)}."
    steps = int(points[-1]["step"])
    if planned_steps is not None and steps < planned_steps:
        count = evaluations_without_improvement(evaluations, criteria)
        runs = "the last evaluation" if count == 1 else f"the last {count} evaluations"
        sentence += f" The run stopped early, at step {steps:,} of {planned_steps:,}: {runs} brought no improvement."
    return sentence
