"""The report's section on training: its ledger, its curve, its validation, how fast it went and waited for data."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.artifacts.artifact import LOG, Artifact
from raytriever.reports.plots import Panel, curve_panels
from raytriever.reports.progress import format_seconds
from raytriever.reports.report import Block, Plot, Section
from raytriever.reports.table import Cell, Table, counted
from trainers.engine.early_stopping import (
    Criterion,
    Evaluation,
    best_evaluation,
    criterion_at,
    evaluations_without_improvement,
)
from trainers.record.ledger import ledger_rows
from trainers.record.run_log import EVALUATIONS, LEDGER, TRAINING, utilization

Points = Sequence[Mapping[str, Any]]


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
    for name in names:
        having = [evaluation for evaluation in evaluations if name in evaluation.measures]
        steps = np.array([evaluation.step for evaluation in having])
        values = np.array([evaluation.measures[name] for evaluation in having])
        panels.append(Panel(name, steps, values, smoothed=False, dots=True, marked=marked))
    caption = "Measures of validation by the steps done."
    if best:
        caption += f" Orange: step {best.step:,}, the best by {decisive}, whose weights are the model's."
    return [Plot(curve_panels(panels, "Validation"), caption), _measure_table(evaluations, best, names, points, log)]


def _measure_table(
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


_EVERY_STEP = (
    "step", "epoch", "learning_rate", "loss", "gradient_norm", "examples", "tokens", "seconds", "waiting_seconds",
)  # fmt: skip
_LABELS = {
    "accuracy": "accuracy (positive ranked first)",
    "positive_rank": "mean rank of the positive",
    "positive_similarity": "mean similarity of the positive",
    "negative_similarity": "mean similarity of the negatives",
}


def training_section_of(model: Artifact) -> Section:
    """The section of a model artifact.

    Reads training.jsonl, ledger.json, and evaluations.jsonl if the run was validated. Times come from the log. Its
    lines are points (with a ``loss``) and evaluations (with ``measures``). The manifest's fact ``criteria`` says which
    measure decided.
    """
    files = model.folder.files()
    points = _lines(model.folder.read_bytes(TRAINING))
    log = _lines(model.folder.read_bytes(LOG)) if LOG in files else []
    stored = _lines(model.folder.read_bytes(EVALUATIONS)) if EVALUATIONS in files else []
    seconds = {line["step"]: line["seconds"] for line in log if "measures" in line}
    return training_section(
        points,
        [line for line in log if "loss" in line],
        json.loads(model.folder.read_bytes(LEDGER)),
        [Evaluation(line["step"], line["measures"], seconds.get(line["step"], 0.0)) for line in stored],
        [Criterion(**criterion) for criterion in model.manifest["facts"]["criteria"]],
    )


def _lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines()]


def training_section(
    points: Points,
    log: Points,
    ledger: Mapping[str, Any],
    evaluations: Sequence[Evaluation] = (),
    criteria: Sequence[Criterion] = (),
) -> Section:
    """``points``: a model's training.jsonl, one mapping a step. ``log``: with times, or empty.

    ``evaluations``: in order, none without validation. ``criteria``: the measures that chose the best of them.
    """
    metrics = _metrics(points)
    changes = [(before, after) for before, after in pairwise(points) if before["epoch"] != after["epoch"]]
    ends = [(before["step"] + after["step"]) / 2 for before, after in changes]
    svg = curve_panels(_panels(points, metrics), "Training curves", ends)
    caption = (
        "Points: one a step (of long runs, means of neighbouring steps). Lines: running mean over a tenth of them."
    )
    if ends:
        caption += " Dotted: an epoch ends. Where the next one has harder batches, the loss rises."
    blocks: list[Block] = [Plot(svg, caption), _table(points, log, metrics)]
    lead = f"{len(points):,} steps over {sum(int(point['examples']) for point in points):,} examples."
    if evaluations:
        steps, planned = int(points[-1]["step"]), int(ledger["steps"])
        if steps < planned:
            count = evaluations_without_improvement(evaluations, criteria)
            lead += (
                f" Stopped early, at step {steps:,} of {planned:,}: {counted(count, 'evaluation')} without improvement."
            )
        blocks = [*validation_blocks(evaluations, criteria, points, log), *blocks]
    caption = "The run's ledger: what its queries are compared with, what a step encodes and what is trained."
    blocks.append(Table(["ledger", "as planned before the first step"], ledger_rows(ledger), caption, text_columns=2))
    return Section("Training", lead, blocks)


def _metrics(points: Points) -> list[str]:
    """The objective's own metrics, those with a label first."""
    others = [name for name in points[0] if name not in (*_EVERY_STEP, *_LABELS)]
    return [*(name for name in _LABELS if name in points[0]), *others]


def _panels(points: Points, metrics: Sequence[str]) -> list[Panel]:
    """Loss and learning rate, then a panel for each metric."""
    steps = np.array([point["step"] for point in points])
    rate = Panel("learning rate", steps, _values(points, "learning_rate"), smoothed=False)
    loss, *others = (Panel(_label(name), steps, _values(points, name)) for name in ("loss", *metrics))
    return [loss, rate, *others]


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _values(points: Points, name: str) -> NDArray[np.float64]:
    return np.array([point[name] for point in points], dtype=np.float64)


def _table(points: Points, log: Points, metrics: Sequence[str]) -> Table:
    window = max(1, len(points) // 10)
    rows = [
        [_label(name), *(f"{_values(part, name).mean():.4f}" for part in (points[:window], points[-window:]))]
        for name in ("loss", *metrics, "gradient_norm")
    ]
    caption = f"Means over {counted(window, 'step')}."
    seconds = sum(float(point["seconds"]) for point in log)
    if seconds > 0:
        examples, tokens, waiting = (
            sum(point[name] for point in log) / seconds for name in ("examples", "tokens", "waiting_seconds")
        )
        caption += (
            f" {seconds / len(log):.2f} s a step, {examples:,.1f} examples/s, {tokens:,.0f} tokens/s, {waiting:.1%} of"
            f" the time waiting for data{utilization(log)}."
        )
    return Table(["mean of", "first tenth of the steps", "last tenth of the steps"], rows, caption)
