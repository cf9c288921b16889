"""The model of a run on many nodes: laws of work, bandwidth, and that it gives back what was measured."""

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale_model import DOMAINS, NODE, Modelled, Workload, calibrated, costs, forecasts, main, stages
from raytriever.errors import UserError
from raytriever.stages.cost import Cost, Size
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN
from trainers.estimate.machines import Machines, seconds_by_cause
from trainers.estimate.recipe import TOKENIZE

FAST = replace(NODE, node_bandwidth=inf, store_bandwidth=inf, network=inf)
SMALL = Workload(domains=(2_000_000, 900_000, 300_000, 20_000), passages=100_000)
PAPER = Workload()


def nodes(count: int, of: Machines = NODE) -> Machines:
    return replace(of, count=count * of.per_node)


def stage(name: str, workload: Workload = PAPER) -> Modelled:
    return next(found for found in stages(workload, {}) if found.name == name)


def test_domains_are_those_of_the_paper() -> None:
    assert len(DOMAINS) == 29
    assert sum(DOMAINS) == 234_553_344
    assert list(DOMAINS) == sorted(DOMAINS, reverse=True)


def test_a_stage_takes_as_long_as_its_equal_tasks_and_what_waits_for_one() -> None:
    one = replace(FAST, count=1, per_node=1, cores=4)
    cost = Cost(Size(), work=60, tasks=6, alone=7)  # two rounds on four cores
    assert seconds_by_cause(cost, 0, one) == {"one task": 7, "cores": 20, "a node's reading": 0}
    assert seconds_by_cause(cost, 0, one, slots=7)["the longest task"] == 10
    assert seconds_by_cause(replace(cost, tasks=10_000), 0, one)["the driver"] == 50
    assert seconds_by_cause(replace(cost, tasks=0), 0, one) == {}
    assert seconds_by_cause(cost, 0, one, slots=6) == {"one task": 7, "cores": 10, "a node's reading": 0}
    written = replace(cost, made=Size(disk=8e9))
    for tasks, of_a_node in ((6, 4), (1, 8)):  # a single task has all of the output on its node
        found = seconds_by_cause(replace(written, tasks=tasks), 3e9, replace(NODE, count=16))
        assert found["a node's reading"] == pytest.approx((3 + of_a_node) / 2)


@settings(max_examples=20)
@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e3), st.floats(1e-2, 1e3))
def test_more_nodes_are_never_slower(node: float, store: float, network: float) -> None:
    machines = replace(NODE, per_node=2, count=2, cores=4, node_bandwidth=node, store_bandwidth=store, network=network)
    before = forecasts(SMALL, machines, {})
    for count in (2, 3, 8):
        found = forecasts(SMALL, nodes(count, machines), {})
        for slower, faster in zip(before, found, strict=True):
            assert faster.seconds <= slower.seconds
            assert faster.nodes <= count
        before = found


@pytest.mark.parametrize("name", ["collect", "cluster", "pack", "filter", "index", "search"])
def test_a_slow_store_takes_over(name: str) -> None:
    slow = replace(nodes(4), store_bandwidth=1e-6)
    cost = costs(SMALL)[name]
    found = seconds_by_cause(cost, 1e6, slow)
    assert max(found, key=lambda cause: found[cause]) == "the store"
    assert found["the store"] == pytest.approx((1e6 * min(4, cost.tasks) + cost.made.disk) / 1e3)


def test_what_a_node_holds_is_not_copied_again() -> None:
    found = {forecast.name: forecast for forecast in forecasts(SMALL, nodes(1), {})}
    assert found["cluster"].copied == {"vectors": 2 * 2 * SMALL.pairs * 384}
    assert found["pack"].copied == found["filter"].copied == {}


@pytest.mark.parametrize(
    ("name", "exponent"), [("collect", 1), ("pairs", 1), ("cluster", 1.5), ("pack", 1), ("filter", 1)]
)
def test_twice_the_pairs_follow_the_law(name: str, exponent: float) -> None:
    once, twice = (costs(Workload(domains=(pairs,)))[name] for pairs in (8_000_000, 16_000_000))
    assert twice.work + twice.alone == pytest.approx(2**exponent * (once.work + once.alone), rel=1e-9)


def test_training_is_what_its_operations_take() -> None:
    machines = replace(FAST, peak=100, share=0.5)
    tokens = PAPER.epochs * PAPER.text_bytes / BYTES_OF_A_TOKEN
    expected = tokens * 8 * PAPER.trained_weights / (8 * 50e12)
    assert stage("train").causes(machines, 0)["GPUs"] == pytest.approx(expected)


def test_a_fast_gpu_waits_for_the_tokens_of_two_threads() -> None:
    machines = replace(FAST, peak=1e6)
    one, four = (
        stage("embed pairs", replace(PAPER, embedders_per_gpu=number)).causes(machines, 0) for number in (1, 4)
    )
    tokens = PAPER.text_bytes / BYTES_OF_A_TOKEN
    assert one["tokenizing"] == pytest.approx(tokens * TOKENIZE / 2 / 8, rel=0.01)
    assert one["tokenizing"] == pytest.approx(4 * four["tokenizing"], rel=0.01)


def test_exchange_of_gradients_hides_behind_the_backward_pass() -> None:
    one, eight, many = (stage("train").causes(nodes(count), 0) for count in (1, 8, 64))
    bytes_sent = PAPER.epochs * PAPER.pairs / PAPER.pairs_per_step * 2 * 4
    layers, words = (bytes_sent * weights / 50e9 for weights in (PAPER.trained_weights, PAPER.word_weights))
    backward = many["GPUs"] * 4 / 6 * 6 / 7  # of documents, six sevenths, encoded once
    assert one["exchange of gradients"] == 0
    assert eight["exchange of gradients"] == pytest.approx(words)  # the layers' are hidden
    assert many["exchange of gradients"] == pytest.approx(layers - backward + words)
    rounded = stage("train", replace(PAPER, exchange_bytes=2)).causes(nodes(64), 0)
    assert rounded["exchange of gradients"] == pytest.approx((layers + words) / 2 - backward)
    assert one["GPUs"] == pytest.approx(64 * many["GPUs"] * 8 / 6)  # encoded twice


def test_jobs_cut_their_work_as_they_are_run() -> None:
    found = costs(Workload(domains=(8_000_000, 1_500_000, 300_000, 100_000), epochs=3))
    assert found["pairs"].tasks == 2 * 99  # texts of both sides, 100,000 a task
    assert found["cluster"].tasks == 353 + 153 + 1 + 1  # a domain's cells are the root of its clusters
    assert found["pack"].tasks == 3 * 10  # regions of a million pairs
    assert found["filter"].tasks == 3 * 155  # a thousand batches of 64
    assert found["search"].tasks == 2 * found["search"].made.shards  # of 8,192 queries
    assert found["evaluate"].made.results == 100 * 10_000


def seconds_of(workload: Workload, factors: dict[str, float], cores: int) -> dict[str, float]:
    found = forecasts(workload, replace(FAST, cores=cores), factors)
    return {forecast.name: forecast.seconds for forecast in found}


def test_the_measured_run_comes_back() -> None:
    """Ten million pairs of one domain on two cores: the table of docs/reports/scale.md."""
    seconds = seconds_of(Workload(domains=(10_000_000,), epochs=1), {}, cores=2)
    # of `pairs` 24 s, because one process hashes texts: it takes as long as starting Ray and hashing by two
    for name, measured in {"pairs": 18, "cluster": 767, "pack": 144, "filter": 246}.items():
        assert seconds[name] == pytest.approx(measured, rel=0.04)


FIGURES = {
    "cores": 4, "dimension": 384, "cluster_size": 64, "batch_size": 64,
    "runs": {
        "100000": {},
        "2000000": {
            "pairs": {"seconds": 20, "gib": 1, "tasks": {"judged": 6, "texts": 10, "pairs": 3}},
            "cluster": {"seconds": 100, "gib": 1, "tasks": {"by_domain": 1, "domain": 5}},
            "pack": {"seconds": 70, "gib": 1, "tasks": {"regions": 1, "epoch": 34}},
            "filter": {"seconds": 30, "gib": 1, "tasks": {"positives": 2, "queries": 1, "epoch": 40, "audit": 0}},
        },
    },
}  # fmt: skip


def test_runs_of_another_machine_come_back() -> None:
    found = seconds_of(Workload(domains=(2_000_000,), epochs=1), calibrated(FIGURES), cores=4)
    for name in ("pairs", "cluster", "pack", "filter"):
        assert found[name] == pytest.approx(FIGURES["runs"]["2000000"][name]["seconds"], rel=0.01)


def test_few_pairs_calibrate_nothing() -> None:
    with pytest.raises(UserError, match=r"100,000 pairs.*batch_construction --pairs 1000000"):
        calibrated({"cores": 2, "cluster_size": 64, "runs": {"100000": {}}})
    with pytest.raises(UserError, match="up to 4,096 clusters in one level"):
        calibrated({"cores": 2, "cluster_size": 256, "runs": {"1000000": {}}})


def test_the_command_names_the_bottleneck(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps(FIGURES))
    arguments = ["--nodes", "1", "3", "--pairs", "5000000", "--gpus", "400", "--calibration", str(figures)]
    monkeypatch.setattr(sys, "argv", ["scale_model", *arguments])
    main()
    said = capsys.readouterr().out
    assert "1 node of 96 cores" in said
    assert "3 nodes of 96 cores" in said
    assert "1.0 times as fast as one node: efficiency 100%" in said
    assert said.count("Bottleneck: ") == 2


@pytest.mark.parametrize("arguments", [["--nodes", "0"], ["--epochs", "0"]])
def test_nothing_is_modelled_on_no_nodes(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scale_model", *arguments])
    with pytest.raises(SystemExit):
        main()
