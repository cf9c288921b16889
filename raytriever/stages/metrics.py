"""Ray's metrics of a run: their names, and how they are recorded.

Every node of a Ray cluster serves them to Prometheus: a counter as ``ray_<name>_total``, a gauge as ``ray_<name>``, a
histogram as ``ray_<name>_bucket``. Labels are ``run`` and ``stage``, since ``job`` is Prometheus's own.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

from raytriever.artifacts.artifact import ShardRecord
from raytriever.artifacts.storage import absolute
from raytriever.reports.log import log


@dataclass(frozen=True)
class Metric:
    """A metric as Ray knows it; ``boundaries`` are the upper ends of a histogram's buckets."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    description: str
    tags: tuple[str, ...] = ("run", "stage")
    boundaries: tuple[float, ...] = ()


SHARDS = Metric("counter", "raytriever_shards", "Shards made.")
ROWS = Metric("counter", "raytriever_rows", "Rows of the shards that were made.")
DROPPED = Metric("counter", "raytriever_dropped", "What was left out, by reason.", ("run", "stage", "reason"))

EXAMPLES = Metric("counter", "raytriever_training_examples", "Examples trained on, all ranks together.")
TOKENS = Metric("counter", "raytriever_training_tokens", "Tokens trained on, all ranks together.")
SECONDS = Metric("counter", "raytriever_training_seconds", "Seconds of training steps.")
WAITING_SECONDS = Metric("counter", "raytriever_training_waiting_seconds", "Seconds of steps spent waiting for data.")
STEP_SECONDS = Metric(
    "histogram",
    "raytriever_training_step_seconds",
    "Seconds of a training step.",
    boundaries=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)
LOSS = Metric("gauge", "raytriever_training_loss", "Loss of the last step.")
LEARNING_RATE = Metric("gauge", "raytriever_training_learning_rate", "Learning rate of the last step.")
NEGATIVES = Metric("gauge", "raytriever_training_negatives_per_query", "Negatives of a query, less those masked.")


def stage_labels(output: str) -> dict[str, str]:
    """The stage's name in logs and metrics, from the folder of its artifact.

    ``run`` is the name of the folder around it, which all stages of a recipe share. ``stage`` is its own name, in a
    recipe the stage's. Runs in folders of one name have one label.
    """
    run, stage = ["", *absolute(output).rstrip("/").split("/")][-2:]
    return {"run": run, "stage": stage}


class StageMetrics:
    """The metrics of one stage, recorded by one process of it.

    Nothing is recorded where Ray doesn't run in this process. Whatever goes wrong costs one line and the metrics, never
    the stage.
    """

    def __init__(self, output: str) -> None:
        self._tags = stage_labels(output)
        self._known: dict[str, Any] = {}  # Ray's object for each metric, by name
        self._off = False

    def record_shard(self, record: ShardRecord) -> None:
        """Counts a shard that was made."""
        self.record(SHARDS, 1)
        self.record(ROWS, record.rows)
        for reason, count in record.dropped.items():
            self.record(DROPPED, count, reason=reason)

    def record(self, metric: Metric, value: float, **tags: str) -> None:
        """Adds ``value`` to a counter, sets a gauge to it or puts it in a histogram's bucket."""
        ray = sys.modules.get("ray")  # where nobody has imported it, it isn't loaded for this
        if self._off or ray is None or not ray.is_initialized():
            return
        try:
            self._record(metric, value, self._tags | tags)
        except Exception as error:
            self._off = True
            log.warning(f"Ray's metrics are off: {type(error).__name__}: {error}. The run goes on without them.")

    def _record(self, metric: Metric, value: float, tags: dict[str, str]) -> None:
        known = self._known.get(metric.name)
        if known is None:
            known = self._known[metric.name] = _known_to_ray(metric)
        match metric.kind:
            case "counter" if value > 0:  # Ray refuses a zero
                known.inc(value, tags)
            case "gauge":
                known.set(value, tags)
            case "histogram":
                known.observe(value, tags)


def _known_to_ray(metric: Metric) -> Any:
    from ray.util import metrics

    if metric.kind == "histogram":
        return metrics.Histogram(metric.name, metric.description, list(metric.boundaries), metric.tags)
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(metric.name, metric.description, metric.tags)
