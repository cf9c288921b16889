"""The report's section on training: the curve, how fast it went and how long it waited for data."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.plots import Curve, curve_panels
from raytriever.retrieval.report import Block, Plot, Section, Table

Points = Sequence[Mapping[str, Any]]

_EVERY_STEP = ("step", "epoch", "learning_rate", "loss", "gradient_norm", "examples", "seconds", "waiting_seconds")
_LABELS = {
    "accuracy": "accuracy (positive ranked first)",
    "positive_rank": "mean rank of the positive",
    "positive_similarity": "mean similarity of the positive",
    "negative_similarity": "mean similarity of the negatives",
}


def training_section(points: Points, log: Points, config: Mapping[str, Any]) -> Section | None:
    """``points``: a model's training.jsonl, one mapping a step; ``log``: with times, or empty. None: no step."""
    if not points:
        return None
    steps = np.array([point["step"] for point in points], dtype=np.int64)
    others = [name for name in points[0] if name not in (*_EVERY_STEP, *_LABELS)]
    metrics = [*(name for name in _LABELS if name in points[0]), *others]
    curves = [
        Curve("loss", _values(points, "loss")),
        Curve("learning rate", _values(points, "learning_rate"), smoothed=False),
        *(Curve(_LABELS.get(name, name.replace("_", " ")), _values(points, name)) for name in metrics),
    ]
    svg = curve_panels(steps, curves, "Training curves", _epoch_ends(points))
    caption = (
        "Points: one a step (of long runs, means of neighbouring steps). Lines: running mean over a tenth of them."
    )
    if len({point["epoch"] for point in points}) > 1:
        caption += " Dotted: an epoch ends."
    blocks: list[Block] = [Plot(svg, caption), _table(points, log, config, metrics)]
    return Section("Training", _lead(points, log), blocks)


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
        rate = sum(int(point["examples"]) for point in log) / seconds
        lead += f" Training ran at {rate:,.1f} examples/s and waited for data {waiting / seconds:.1%} of the time."
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
        [
            _LABELS.get(name, name.replace("_", " ")),
            *(f"{_values(part, name).mean():.4f}" for part in _ends(points, window)),
        ]
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
