"""The report's section on training: its ledger, its curve, its validation, how fast it went and waited for data."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.artifacts import LOG, Artifact
from raytriever.retrieval.curve_plots import Curve, Panel, curve_panels
from raytriever.retrieval.report import Block, Plot, Section, Table
from raytriever.trainers.early_stopping import Criterion, Evaluation
from raytriever.trainers.ledger import ledger_rows
from raytriever.trainers.validation_report import validation_blocks, validation_sentence

Points = Sequence[Mapping[str, Any]]

TRAINING = "training.jsonl"
EVALUATIONS = "evaluations.jsonl"
LEDGER = "ledger.json"

_EVERY_STEP = (
    "step", "epoch", "learning_rate", "loss", "gradient_norm", "examples", "tokens", "seconds", "waiting_seconds",
)  # fmt: skip
_LABELS = {
    "accuracy": "accuracy (positive ranked first)",
    "positive_rank": "mean rank of the positive",
    "positive_similarity": "mean similarity of the positive",
    "negative_similarity": "mean similarity of the negatives",
}
_TARGETS = ("target_min", "target_mean", "target_max")  # Fig. 6 of Gienapp et al. 2025
_SHARE = re.compile(r"won_by_(\w+)_(\d+)")  # §4.2.2 of Xie & Lukasiewicz 2025


def training_section_of(model: Artifact) -> Section | None:
    """The section of a model artifact; what an older one lacks is left out.

    Read are training.jsonl, evaluations.jsonl, ledger.json and, for times, the log, whose lines are points (with a
    ``loss``) and evaluations (with ``measures``). The manifest's fact ``criteria`` says which measure decided.
    """
    files = model.folder.files()
    points = _lines(model.folder.read_bytes(TRAINING))
    log = _lines(model.folder.read_bytes(LOG)) if LOG in files else []
    stored = _lines(model.folder.read_bytes(EVALUATIONS)) if EVALUATIONS in files else []
    seconds = {line["step"]: line.get("seconds", 0.0) for line in log if "measures" in line}
    return training_section(
        points,
        [line for line in log if "loss" in line],
        model.config,
        evaluations=[Evaluation(line["step"], line["measures"], seconds.get(line["step"], 0.0)) for line in stored],
        criteria=[Criterion(**criterion) for criterion in model.manifest["facts"].get("criteria", [])],
        ledger=json.loads(model.folder.read_bytes(LEDGER)) if LEDGER in files else None,
    )


def _lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines() if line]


def training_section(
    points: Points,
    log: Points,
    config: Mapping[str, Any],
    *,
    evaluations: Sequence[Evaluation] = (),
    criteria: Sequence[Criterion] = (),
    ledger: Mapping[str, Any] | None = None,
) -> Section | None:
    """``points``: a model's training.jsonl, one mapping a step; ``log``: with times, or empty. None: no step.

    ``evaluations``: in order, none where nothing was validated; ``criteria``: by which the best of them was found.
    """
    if not points:
        return None
    metrics = _metrics(points)
    svg = curve_panels(_panels(points, metrics), "Training curves", _epoch_ends(points))
    caption = (
        "Points: one a step (of long runs, means of neighbouring steps). Lines: running mean over a tenth of them."
    )
    if len({point["epoch"] for point in points}) > 1:
        caption += " Dotted: an epoch ends."
    blocks: list[Block] = [Plot(svg, caption), _table(points, log, config, metrics)]
    lead = _lead(points, log)
    if evaluations:
        planned = None if ledger is None else int(ledger["steps"])
        lead = f"{lead} {validation_sentence(evaluations, criteria, points, log, planned)}".rstrip()
        blocks = [*validation_blocks(evaluations, criteria, points, log), *blocks]
    if ledger is not None:
        blocks.append(_ledger_table(ledger))
    return Section("Training", lead, blocks)


def _metrics(points: Points) -> list[str]:
    """The objective's own metrics, those with a label first."""
    others = [name for name in points[0] if name not in (*_EVERY_STEP, *_LABELS)]
    return [*(name for name in _LABELS if name in points[0]), *others]


def _panels(points: Points, metrics: Sequence[str]) -> list[Panel]:
    """Loss and learning rate, then a panel for each metric; targets share one, and so do the shares of layers."""

    def curve(name: str, label: str) -> Curve:
        return Curve(label, np.array([point["step"] for point in points], dtype=np.int64), _values(points, name))

    panels = [
        Panel("loss", [curve("loss", "loss")]),
        Panel("learning rate", [curve("learning_rate", "learning rate")], smoothed=False),
    ]
    shares = {name: match for name in metrics if (match := _SHARE.fullmatch(name))}
    joined = {*shares, *(_TARGETS if all(name in metrics for name in _TARGETS) else ())}
    if joined & set(_TARGETS):
        panels.append(Panel("targets", [curve(name, name.removeprefix("target_")) for name in _TARGETS]))
    if shares:
        ordered = sorted(shares, key=lambda name: int(shares[name][2]))
        unit = shares[ordered[0]][1].replace("_", " ")
        stacked = [curve(name, f"{unit} {shares[name][2]}") for name in ordered]
        panels.append(Panel(f"share of queries won by each {unit}", stacked, stacked=True))
    panels += [Panel(_label(name), [curve(name, name)]) for name in metrics if name not in joined]
    return panels


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _values(points: Points, name: str) -> NDArray[np.float64]:
    return np.array([point[name] for point in points], dtype=np.float64)


def _epoch_ends(points: Points) -> list[float]:
    return [
        (before["step"] + after["step"]) / 2 for before, after in pairwise(points) if before["epoch"] != after["epoch"]
    ]


def _lead(points: Points, log: Points) -> str:
    examples = sum(int(point["examples"]) for point in points)
    lead = f"{len(points):,} steps over {examples:,} examples. {loss_sentence(_values(points, 'loss'))}"
    seconds = sum(float(point["seconds"]) for point in log)
    if seconds > 0:
        waiting = sum(float(point["waiting_seconds"]) for point in log)
        rate = f"{sum(int(point['examples']) for point in log) / seconds:,.1f} examples/s"
        tokens = sum(int(point.get("tokens", 0)) for point in log)
        if tokens:
            rate += f" ({tokens / seconds:,.0f} tokens/s)"
        lead += f" Training ran at {rate} and waited for data {waiting / seconds:.1%} of the time."
    return lead


def loss_sentence(losses: NDArray[np.float64]) -> str:
    """The first tenth of the steps against the last; says that the loss moved only beyond twice the standard error."""
    window = max(1, len(losses) // 10)
    first, last = losses[:window], losses[-window:]
    if window < 5:
        return f"The loss is {losses[0]:.3f} at the first step and {losses[-1]:.3f} at the last."
    means = f"from {first.mean():.3f} to {last.mean():.3f}"
    error = float(np.sqrt(first.var(ddof=1) / window + last.var(ddof=1) / window))
    change = float(last.mean() - first.mean())
    if abs(change) <= 2 * error:
        return f"The mean loss goes {means} (first and last {window} steps), which is within twice its standard error."
    return f"The mean loss {'falls' if change < 0 else 'rises'} {means} (first and last {window} steps)."


def _table(points: Points, log: Points, config: Mapping[str, Any], metrics: Sequence[str]) -> Table:
    window = max(1, len(points) // 10)
    rows = [
        [_label(name), *(f"{_values(part, name).mean():.4f}" for part in _ends(points, window))]
        for name in ("loss", *metrics, "gradient_norm")
    ]
    settings = config.get("training", {})
    objective = config.get("objective", {}).get("kind")
    parts = [f"objective {objective}"] if objective else []
    if "batches_per_step" in settings:
        parts.append(f"batches a step: {settings['batches_per_step']}")
    if "bf16" in settings:
        parts.append("bfloat16 autocast" if settings["bf16"] is True else "float32")
    seconds = sum(float(point["seconds"]) for point in log)
    if seconds > 0:
        parts.append(f"{seconds / len(log):.2f} s a step")
    caption = f"Means over {window:,} step{'s' if window > 1 else ''}"
    caption += f" ({', '.join(parts)})." if parts else "."
    return Table(["mean of", "first tenth of the steps", "last tenth of the steps"], rows, caption)


def _ends(points: Points, window: int) -> tuple[Points, Points]:
    return points[:window], points[-window:]


def _ledger_table(ledger: Mapping[str, Any]) -> Table:
    caption = "The run's ledger: what its queries are compared with, what a step encodes and what is trained."
    return Table(["ledger", "as planned before the first step"], ledger_rows(ledger), caption, text_columns=2)
