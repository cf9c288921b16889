"""What Ray's metrics are told, by a Ray that only listens, and what becomes of a run when they fail."""

from math import isnan
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.util.metrics

from raytriever.artifacts.artifact import ShardRecord
from raytriever.stages import metrics
from raytriever.stages.metrics import DROPPED, LOSS, ROWS, SHARDS, StageMetrics, stage_labels
from tests.unit.raytriever.stages.test_stage import Numbers, config_in, run
from tests.unit.test_grafana import METRICS

Told = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Ray's metrics of this process, which note what they are told and refuse what Ray's own do."""
    noted: Told = []

    class Listening:
        def __init__(self, name: str, description: str, *others: Any) -> None:
            self.name, self.tags = name, set(others[-1])
            assert description.endswith(".")

        def note(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self.tags
            assert all(isinstance(tag, str) for tag in tags.values())
            noted.append((self.name, value, tags))

        set = observe = note

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0
            self.note(value, tags)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray.util.metrics, kind, Listening)
    return noted


@pytest.mark.parametrize(("output", "labels"), [
    ("/shared/runs/quickstart/base_vectors", ("quickstart", "base_vectors")),
    ("/shared/runs/quickstart/base_vectors/", ("quickstart", "base_vectors")),
    ("s3://bucket/runs/quickstart/model", ("quickstart", "model")),
    ("/runs/alice@lab/model", ("alice@lab", "model")),
    ("/model", ("", "model")),
])  # fmt: skip
def test_a_stage_is_labelled_by_its_folder(output, labels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuple(stage_labels(output).values()) == labels
    monkeypatch.chdir(tmp_path)
    assert stage_labels("vectors") == {"run": tmp_path.name, "stage": "vectors"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_ray_accepts_every_metric(metric: metrics.Metric) -> None:
    made = metrics._known_to_ray(metric)
    assert not made._discard_metric
    assert made.info["name"] == metric.name
    assert made.info["tag_keys"] == metric.tags
    assert made.info.get("boundaries", []) == list(metric.boundaries)
    assert metric.name.startswith("raytriever_")


def test_a_shard_is_counted(told: Told) -> None:
    record = ShardRecord("a", 5, (), dropped={"too short": 2, "repeated": 0})
    StageMetrics("/runs/mine/chunks").record_shard(record)
    labels = {"run": "mine", "stage": "chunks"}
    assert told == [
        (SHARDS.name, 1, labels),
        (ROWS.name, 5, labels),
        (DROPPED.name, 2, labels | {"reason": "too short"}),
    ]
    StageMetrics("/runs/mine/model").record(LOSS, float("nan"))
    assert isnan(told[-1][1])  # told as it is


def test_a_stage_tells_of_what_it_makes_and_of_nothing_that_is_there(told: Told, tmp_path: Path) -> None:
    stage = Numbers(config_in(tmp_path))
    run(stage)
    labels = {"run": tmp_path.name, "stage": "out"}
    assert sum(value for name, value, tags in told if name == ROWS.name and tags == labels) == 1 + 2 + 3
    assert sum(value for name, value, _ in told if name == SHARDS.name) == 3
    told.clear()
    run(stage)
    assert told == []


def test_without_ray_nothing_is_told(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    StageMetrics("/runs/mine/chunks").record(ROWS, 1)
    monkeypatch.delitem(metrics.sys.modules, "ray")
    StageMetrics("/runs/mine/chunks").record(ROWS, 1)
    assert "ray" not in metrics.sys.modules  # nor is it loaded for this
    assert told == []


@pytest.mark.usefixtures("told")
def test_what_goes_wrong_costs_one_line(monkeypatch: pytest.MonkeyPatch, logged: list[str], tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no agent")

    monkeypatch.setattr(ray.util.metrics, "Counter", broken)
    assert run(Numbers(config_in(tmp_path))).rows == 5
    lines = [line for line in logged if "metrics" in line]
    assert lines == ["Ray's metrics are off: RuntimeError: no agent. The run goes on without them."]
