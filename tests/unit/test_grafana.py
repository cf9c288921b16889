"""The Grafana dashboard: a panel for every metric that is told, no other metric, nothing that Grafana doesn't know."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raytriever.stages import metrics
from raytriever.stages.metrics import Metric

PATH = Path(__file__).parents[2] / "cluster_configs" / "grafana" / "raytriever.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
METRICS = [value for value in vars(metrics).values() if isinstance(value, Metric)]

# What Grafana's schema of dashboards knows, of what this file uses; a key that is not here is a mistake
DASHBOARD_KEYS = {
    "uid", "title", "description", "tags", "schemaVersion", "version", "editable", "graphTooltip", "refresh", "time",
    "timezone", "annotations", "links", "templating", "panels",
}  # fmt: skip
PANEL_KEYS = {
    "id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets",
}  # fmt: skip
TARGET_KEYS = {"refId", "datasource", "editorMode", "expr", "legendFormat", "range"}
VARIABLE_KEYS = {
    "name", "label", "type", "datasource", "definition", "query", "refresh", "sort", "multi", "includeAll", "allValue",
    "current",
}  # fmt: skip


def exported(metric: Metric) -> set[str]:
    """The names under which Prometheus finds a metric."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    return {f"ray_{metric.name}{ending}" for ending in endings[metric.kind]}


def grouped_by(query: str) -> set[str]:
    return {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}


def test_a_panel_for_every_metric_and_no_other() -> None:
    asked = {name for query in QUERIES for name in re.findall(r"ray_\w+", query)}
    assert asked <= set().union(*map(exported, METRICS))
    for metric in METRICS:
        assert asked & exported(metric), metric.name


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_by_run_and_stage_for_what_the_kind_allows(query: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)
    for name, selector in re.findall(r"(ray_\w+)(\{[^}]*\})?", query):
        assert selector == '{run=~"$run", stage=~"$stage"}'
        (metric,) = (metric for metric in METRICS if name in exported(metric))
        before = query[: query.index(name)]
        if metric.kind == "gauge":
            # an older value of a gauge that Ray has forgotten: steps may be longer than Ray's memory
            assert before.endswith("last_over_time(")
        elif metric.kind == "histogram":
            assert before.endswith("rate(")  # processes start at zero, at different times
        assert {"run", "stage"} <= grouped_by(query) <= {*metric.tags, "le"}


def test_speeds_are_rates_and_legends_name_labels_that_the_query_keeps() -> None:
    for name in ("rows", "training_tokens", "training_examples", "training_waiting_seconds"):
        assert any(f"rate(ray_raytriever_{name}_total{{" in query for query in QUERIES)
    assert any(query.startswith("histogram_quantile(") for query in QUERIES)
    for target in (target for panel in PANELS for target in panel["targets"]):
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels == grouped_by(target["expr"]) - {"le"}


def test_grafana_knows_every_key() -> None:
    assert set(DASHBOARD) == DASHBOARD_KEYS
    for panel in PANELS:
        assert set(panel) == PANEL_KEYS
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == SOURCE
        for target in panel["targets"]:
            assert set(target) == TARGET_KEYS
            assert target["datasource"] == SOURCE
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_variables_are_asked_for() -> None:
    source, *others = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [variable["name"] for variable in others] == ["run", "stage"]
    for variable in (source, *others):
        assert set(variable) <= VARIABLE_KEYS
    text = PATH.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == {"datasource", "run", "stage"}


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_the_documents_name_it() -> None:
    assert "`grafana/raytriever.json`" in (PATH.parents[1] / "README.md").read_text()
    assert "cluster_configs/grafana/raytriever.json" in (PATH.parents[2] / "docs/reference/cluster.md").read_text()
