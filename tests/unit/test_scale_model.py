"""The model of a run on many nodes: laws of work, scheduling, bandwidth, and that it gives back what was measured."""

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale_model import DOMAINS, Workload, calibrated, forecasts, main, stages, total_hours, where_held
from raytriever.errors import UserError
from trainers.estimate.costs import Calibration, Phase, Stage, makespan, seconds_by_cause
from trainers.estimate.machines import Machines

TASKS = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)
FREE = replace(Calibration(), start_up=0, task=0)  # nothing but work
FAST = Machines(node_bandwidth=inf, store_bandwidth=inf, network=inf)
SMALL = Workload(domains=(2_000_000, 900_000, 300_000, 20_000), passages=100_000)


PAPER = Workload()


def stage(name: str, workload: Workload = PAPER, machines: Machines = FAST, calibration: Calibration = FREE) -> Stage:
    return next(found for found in stages(workload, calibration, machines) if found.name == name)


def work(of: Stage) -> float:
    return sum(sum(phase.tasks) for phase in of.phases)


def test_domains_are_those_of_the_paper() -> None:
    assert len(DOMAINS) == 29
    assert sum(DOMAINS) == 234_553_344
    assert list(DOMAINS) == sorted(DOMAINS, reverse=True)


@given(TASKS, st.integers(1, 50))
def test_a_schedule_is_as_long_as_the_largest_task_and_the_mean_and_no_longer_with_more_slots(
    tasks: list[float], slots: int
) -> None:
    length = makespan(tasks, slots)
    mean = sum(tasks) / slots
    assert length >= max(max(tasks), mean) * (1 - 1e-12)
    assert length <= mean + max(tasks) * (1 + 1e-12)  # Graham's bound of a list schedule
    assert makespan(tasks, slots + 1) <= length * (1 + 1e-12)
    assert makespan(tasks, 1) == pytest.approx(sum(tasks))


def test_a_schedule_begins_tasks_in_their_order() -> None:
    assert makespan([1, 1, 2], 2) == 3
    assert makespan([2, 1, 1], 2) == 2


def test_one_core_and_one_gpu_take_the_sum_of_all_work() -> None:
    one = replace(FAST, cores=1, gpus=1)
    expected = sum(work(found) + sum(found.alone.values()) for found in stages(SMALL, FREE, one))
    assert total_hours(forecasts(SMALL, FREE, one)) * 3600 == pytest.approx(expected)


@settings(max_examples=20)
@given(st.floats(1e7, 1e11), st.floats(1e7, 1e12), st.floats(1e7, 1e12))
def test_more_nodes_are_never_slower(node: float, store: float, network: float) -> None:
    machines = Machines(cores=4, gpus=2, node_bandwidth=node, store_bandwidth=store, network=network)
    before = forecasts(SMALL, Calibration(), machines)
    for nodes in (2, 3, 8):
        found = forecasts(SMALL, Calibration(), replace(machines, nodes=nodes))
        for slower, faster in zip(before, found, strict=True):
            assert faster.seconds <= slower.seconds
            assert faster.nodes <= nodes
        before = found


@pytest.mark.parametrize("name", ["collect", "embed pairs", "cluster", "pack", "filter", "train", "index", "search"])
def test_a_slow_store_takes_over(name: str) -> None:
    slow = replace(Machines(nodes=4), store_bandwidth=1e3)
    of_stage = stage(name, SMALL, slow)
    found = seconds_by_cause(of_stage, Calibration(), slow)
    assert max(found, key=lambda cause: found[cause]) == "the store"
    busy = min(4, max(len(phase.tasks) for phase in of_stage.phases))
    assert found["the store"] == pytest.approx((sum(of_stage.copied.values()) * busy + of_stage.shared) / 1e3)
    half = seconds_by_cause(of_stage, Calibration(), replace(slow, store_bandwidth=500))
    assert half["the store"] == pytest.approx(2 * found["the store"])


def test_what_a_node_holds_is_not_copied_again() -> None:
    found = {forecast.stage.name: forecast for forecast in forecasts(SMALL, FREE, Machines())}
    assert found["cluster"].stage.copied == {"vectors": 2 * 2 * SMALL.pairs * 384}
    assert found["pack"].stage.copied == {}
    assert found["filter"].stage.copied.keys() == {"texts"}
    on_more = where_held(stage("pack", SMALL), 3, {"vectors": 2})
    assert on_more.copied == stage("pack", SMALL).copied
    # a node's own reading is told from the store's
    machines = Machines(nodes=4, node_bandwidth=1e3)
    found = seconds_by_cause(stage("pack", SMALL, machines), Calibration(), machines)
    assert found["a node's reading"] == pytest.approx(2 * 2 * SMALL.pairs * 384 / 1e3)
    assert "the store" not in found


@pytest.mark.parametrize(
    ("name", "phases", "exponent"),
    [
        ("collect", slice(0, 1), 1),
        ("pairs", slice(0, 3), 1),
        ("cluster", slice(1, 3), 1.5),  # the cells' sample and the cells
        ("pack", slice(1, 2), 1),  # epochs
        ("filter", slice(0, 1), 1),
        ("train", slice(0, 1), 1),
    ],
)
def test_twice_the_pairs_follow_the_law(name: str, phases: slice, exponent: float) -> None:
    unopened = replace(FREE, open_vectors=0.0)
    once, twice = (
        sum(sum(phase.tasks) for phase in stage(name, Workload(domains=(pairs,)), calibration=unopened).phases[phases])
        for pairs in (8_000_000, 16_000_000)
    )
    assert twice == pytest.approx(2**exponent * once, rel=1e-9)


def test_every_core_opens_each_file_once() -> None:
    def opening(pairs: int, cores: int) -> float:
        workload, machines = Workload(domains=(pairs,)), replace(FAST, cores=cores)
        without = stage("filter", workload, machines, replace(FREE, open_vectors=0.0))
        return work(stage("filter", workload, machines)) - work(without)

    size = 16_384 * 1_000
    assert opening(2 * size, 8) == pytest.approx(2 * opening(size, 8), rel=1e-3)
    assert opening(size, 16) == pytest.approx(2 * opening(size, 8), rel=1e-3)
    assert opening(64_000, 8) == pytest.approx(opening(64_000, 3), rel=1e-3)  # three runs of batches, one an epoch


def test_training_is_what_its_operations_take() -> None:
    workload, machines = PAPER, replace(FAST, gpus=8, peak=100e12, share=0.5)
    tokens = workload.epochs * workload.text_bytes / FREE.bytes_per_token
    expected = tokens * 8 * workload.trained_weights / (8 * 50e12)
    assert seconds_by_cause(stage("train", workload, machines), FREE, machines)["GPUs"] == pytest.approx(expected)


def test_a_fast_gpu_waits_for_the_tokens_of_two_threads() -> None:
    machines = replace(FAST, peak=1e18)
    one, four = (stage("embed pairs", replace(PAPER, embedders_per_gpu=number), machines) for number in (1, 4))
    assert one == stage("embed pairs", PAPER, machines)
    (phase,) = one.phases
    assert phase.slots == "tokenizing"
    assert sum(phase.tasks) == pytest.approx(PAPER.text_bytes / FREE.bytes_per_token * FREE.tokenize / 2)
    of_one, of_four = (seconds_by_cause(found, FREE, machines)["tokenizing"] for found in (one, four))
    assert of_one == pytest.approx(4 * of_four, rel=0.01)


def test_exchange_of_gradients_hides_behind_the_backward_pass() -> None:
    workload = PAPER
    one, eight, many = (stage("train", machines=Machines(nodes=nodes)) for nodes in (1, 8, 64))
    bytes_sent = workload.epochs * workload.pairs / workload.pairs_per_step * 2 * 4
    layers, words = (bytes_sent * weights / 50e9 for weights in (workload.trained_weights, workload.word_weights))
    backward = many.phases[0].tasks[0] * 4 / 6 * 6 / 7  # of documents, six sevenths, encoded once
    assert one.alone["exchange of gradients"] == 0
    assert eight.alone["exchange of gradients"] == pytest.approx(words)  # the layers' are hidden
    assert many.alone["exchange of gradients"] == pytest.approx(layers - backward + words)
    rounded = stage("train", replace(workload, exchange_bytes=2), Machines(nodes=64))
    assert rounded.alone["exchange of gradients"] == pytest.approx((layers + words) / 2 - backward)
    assert one.phases[0].tasks[0] == pytest.approx(64 * many.phases[0].tasks[0] * 8 / 6)  # encoded twice


def test_pairs_are_joined_and_ordered_by_one_node() -> None:
    joined, hashed, written = (phase.tasks for phase in stage("pairs", Workload(domains=(32_000_000,))).phases)
    assert (len(joined), len(hashed), len(written)) == (1, 640, 1)
    assert joined[0] + sum(hashed) + written[0] == pytest.approx(32_000_000 * FREE.pairs)


def test_a_region_of_an_epoch_is_a_task_and_cells_share_the_work_of_their_domain() -> None:
    workload = Workload(domains=(8_000_000, 1_500_000, 300_000, 100_000), epochs=3)
    dividing, packing, dealing = (phase.tasks for phase in stage("pack", workload).phases)
    assert [task / dividing[0] for task in dividing] == pytest.approx([1, 1.5 / 8])
    assert len(packing) == 3 * (8 + 2 + 1)
    assert len(dealing) == 3 * (8 + 2)  # shares of what regions have set aside
    assert max(packing[:8]) == pytest.approx(sum(packing[:8]) / 8)
    cells = stage("cluster", Workload(domains=(64_000_000,))).phases[-1].tasks
    assert len(cells) == 1_000  # the root of a million clusters
    assert max(cells) < 2 * sum(cells) / len(cells)


def seconds_of(workload: Workload, calibration: Calibration, cores: int) -> dict[str, float]:
    found = forecasts(workload, calibration, replace(FAST, cores=cores))
    return {forecast.stage.name: forecast.seconds for forecast in found}


def test_the_measured_run_comes_back() -> None:
    """Ten million pairs of one domain on two cores: the table of docs/scale.md."""
    seconds = seconds_of(Workload(domains=(10_000_000,), epochs=1), FREE, cores=2)
    for stage, measured in {"pairs": 48, "cluster": 767, "pack": 144, "filter": 246}.items():
        assert seconds[stage] == pytest.approx(measured, rel=0.04)


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
    calibration = replace(calibrated(FIGURES), start_up=0, task=0, open_vectors=0.0)
    found = seconds_of(Workload(domains=(2_000_000,), epochs=1), calibration, cores=4)
    assert found["pairs"] == pytest.approx(20, rel=0.01)
    assert found["cluster"] == pytest.approx(100, rel=0.06)
    assert found["pack"] == pytest.approx(70, rel=0.02)  # two regions, on two of the cores
    assert found["filter"] == pytest.approx(30, rel=0.01)


def test_few_pairs_calibrate_nothing() -> None:
    with pytest.raises(UserError, match=r"100,000 pairs.*batch_construction --pairs 1000000"):
        calibrated({"cores": 2, "cluster_size": 64, "runs": {"100000": {}}})
    with pytest.raises(UserError, match="up to 4,096 clusters in one level"):
        calibrated({"cores": 2, "cluster_size": 256, "runs": {"1000000": {}}})


def test_handing_out_many_small_tasks_bounds_a_stage() -> None:
    many = Stage("many", [Phase([1e-3] * 1_000)])
    found = seconds_by_cause(many, replace(FREE, task=0.01), FAST)
    assert found["the driver"] == pytest.approx(10)
    assert sum(found.values()) == pytest.approx(10)


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
