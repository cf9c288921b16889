"""From trials to rows, the best one, the lines, the page and the JSON."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from raytriever.artifacts.storage import Folder
from raytriever.sweep.plan import folder_name, grid, parse_axis
from raytriever.sweep.report import sweep_lines, sweep_section, write_sweep
from raytriever.sweep.results import Column, Result, SweepResult, _changed_system, choose_columns, read_result
from tests.unit.small_run import make_artifact

NDCG, RECALL = Column("evaluation", "trained", "nDCG@10"), Column("evaluation", "trained", "R@100")
MARGIN, SEED = "model.objective.margin", "model.training.seed"


def result(margin: str, seed: str, ndcg: float | None) -> Result:
    values = {MARGIN: margin, SEED: seed}
    name = folder_name(values, list(values))
    if ndcg is None:
        return Result(name, values, {}, failure="the <loss> & more is not a number")
    return Result(name, values, {NDCG: ndcg, RECALL: 1 - ndcg}, 30.0)


RESULTS = [
    result("0", "1", 0.25), result("0", "2", 0.75),
    result("0.5", "1", 0.625), result("0.5", "2", None),
    result("1", "1", None), result("1", "2", None),
]  # fmt: skip


def swept(results: list[Result] = RESULTS, **changes: object) -> SweepResult:
    values = {
        "recipe": "margins", "settings": {"grid": [f"{MARGIN}=0,0.5,1"]}, "keys": [MARGIN], "seed_key": SEED,
        "columns": [NDCG, RECALL], "results": results, "test_split": True,
    }  # fmt: skip
    return SweepResult(**(values | changes))


def test_seeds_are_one_row_and_what_failed_is_left_out_of_it():
    rows = swept().rows
    assert [row.values for row in rows] == [{MARGIN: "0"}, {MARGIN: "0.5"}, {MARGIN: "1"}]
    first = rows[0].spread(NDCG)
    assert first.mean == 0.5
    assert first.deviation == pytest.approx(np.sqrt(0.125))  # n - 1: (0.25² + 0.25²) / 1
    assert rows[1].spread(NDCG).mean == 0.625
    assert rows[1].spread(NDCG).deviation is None
    assert rows[2].spread(NDCG) is None
    assert (rows[0].seconds, rows[2].seconds) == (30.0, None)
    assert swept(columns=[NDCG, Column("other", "trained", "R@100")]).title(NDCG) == "evaluation: nDCG@10"
    assert len(swept(seed_key=None).rows) == 6  # without seeds every trial is one


def test_the_table_shows_everything_and_marks_the_highest():
    lines = sweep_lines(swept())
    assert lines[1] == "margins: 3 settings, 6 trials, 3 failed; measures of 'trained'"
    assert [line.split() for line in lines[3:7]] == [
        ["margin", "seeds", "nDCG@10", "R@100", "time"],
        ["0", "2", "0.5000", "±", "0.3536", "0.5000", "±", "0.3536", "*", "30.0", "s"],
        ["0.5", "1", "of", "2", "0.6250", "*", "0.3750", "30.0", "s"],
        ["1", "0", "of", "2", "failed", "failed"],
    ]
    assert "margin=0.5,seed=2 failed: the <loss> & more is not a number" in lines
    assert "* highest; mean ± standard deviation over the seeds" in lines
    assert "test split" in lines[-1]
    assert "test split" not in "".join(sweep_lines(swept(test_split=False)))


def test_equal_settings_are_equally_highest_and_failures_alone_are_no_best():
    equal = [result("0", "1", 0.5), result("1", "1", 0.5)]
    lines = sweep_lines(swept(equal, columns=[NDCG]))
    assert sum(line.count("0.5000 *") for line in lines) == 2
    assert "test split" in lines[-1]
    assert "*" not in "".join(sweep_lines(swept(equal[:1])))  # there is none below it
    nothing = swept([result("0", "1", None), result("1", "1", None)])
    assert not any("*" in line for line in sweep_lines(nothing))
    assert sweep_section(nothing).lead == "margins: 2 settings, 2 trials, 2 failed"


def test_many_measures_go_below_one_another():
    columns = [Column(f"evaluation on {name}", "trained", "nDCG@10") for name in ("cacm", "cisi", "nfcorpus", "npl")]
    results = [Result("a", {MARGIN: str(n), "m.kind": "static"}, dict.fromkeys(columns, 0.5)) for n in range(3)]
    lines = sweep_lines(swept(results, columns=columns, keys=[MARGIN, "m.kind"]))
    assert max(len(line) for line in lines) <= 100
    assert sum(line.startswith("margin  kind    seeds  evaluation on") for line in lines) == 2


def test_the_page_and_the_json_hold_every_trial(place):
    written = write_sweep(swept(), place)
    assert written == [f"{place}/sweep.html", f"{place}/sweep.json"]
    page = Folder(place).read_bytes("sweep.html").decode()
    for text in ("A resumed stage counts its last attempt alone",
                 "margins: 3 settings, 6 trials, 3 failed", "0.5000 ± 0.3536",
                 "margin=1,seed=2 failed: the &lt;loss&gt; &amp; more", "1 of 2", "test split", "<svg"):  # fmt: skip
        assert text in page
    stored = json.loads(Folder(place).read_bytes("sweep.json"))
    assert [trial["error"] for trial in stored["trials"]].count("the <loss> & more is not a number") == 3
    assert stored["trials"][0]["measures"][0] == {
        "evaluation": "evaluation", "system": "trained", "measure": "nDCG@10", "value": 0.25,
    }  # fmt: skip
    assert stored["trials"][0]["values"] == {MARGIN: "0", SEED: "1"}


def svg_of(of: SweepResult) -> str:
    return "".join(block.svg for block in sweep_section(of).blocks if hasattr(block, "svg"))


@pytest.mark.parametrize(("texts", "is_joined"), [
    (["m.margin=0,0.25,0.5,0.75,1"], True),
    (["m.kind=static,adaptive"], False),
    (["m.rate=1e-6,1e-5,1e-3"], True),
    (["m.margin=0,0.5,1", "m.kind=a,b"], False),
    (["m.x=1,2", "m.y=1,2", "m.z=1,2"], False),
])  # fmt: skip
def test_the_plot_follows_from_what_is_swept(texts, is_joined):
    axes = [parse_axis(text, "--grid") for text in texts]
    lost, *settings = grid(axes)
    results = [Result("t", values, {NDCG: 0.1 * n}) for n, values in enumerate(settings, start=1)]
    results = [Result("t", lost, {}, failure="lost"), *results]
    svg = svg_of(swept(results, keys=[key for key, _ in axes], seed_key=None, columns=[NDCG]))
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == "nDCG@10 of 'trained'"
    assert ("stroke-width: 1.4; stroke-linecap: square" in svg) == is_joined  # a line through the values of one setting
    assert not [element for element in root.iter() if element.tag.endswith("}image")]
    assert "mathdefault" not in svg
    assert "nan" not in svg.lower()


def test_a_plot_shows_means_and_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("raytriever.sweep.report.setting_panels", lambda panels, _: shown.extend(panels))
    sweep_section(swept(columns=[NDCG]))
    np.testing.assert_array_equal(shown[0].means, [0.5, 0.625, np.nan])
    np.testing.assert_allclose(shown[0].deviations, [np.sqrt(0.125), 0.0, 0.0])


def test_the_system_measured_is_that_which_the_sweep_changes():
    outputs = {"bm25": "a", "trained": "b"}
    stages = {name: SimpleNamespace(config=SimpleNamespace(output=output)) for name, output in outputs.items()}
    evaluation = SimpleNamespace(config=SimpleNamespace(runs={"BM25": "a", "ours": "b"}))
    for changed, expected in (("trained", "ours"), ("bm25", "BM25"), ("nothing", "BM25")):
        trial = SimpleNamespace(stages=stages, depends={name: name == changed for name in outputs})
        assert _changed_system(trial, evaluation) == expected


def test_a_system_is_compared_where_it_is_evaluated():
    def evaluation(*systems: str) -> SimpleNamespace:
        config = SimpleNamespace(runs=dict.fromkeys(systems, "run"))
        return SimpleNamespace(command="evaluate", config=config, resolved=lambda: {"measures": ["nDCG@10"]})

    stages = {"cacm": evaluation("BM25"), "cisi": evaluation("BM25", "ours")}
    assert choose_columns(SimpleNamespace(stages=stages), [], "ours") == [Column("cisi", "ours", "nDCG@10")]


def test_a_result_is_read_of_the_trials_own_folders(tmp_path):
    means = {"trained": {"nDCG@10": 0.25, "R@100": 0.5}, "BM25": {"nDCG@10": 0.75, "R@100": 1.0}}
    files = {"metrics.json": json.dumps({"means": means})}
    depends = {"corpus": (), "trained": (MARGIN,), "evaluation": (MARGIN,)}
    outputs = {name: make_artifact(tmp_path / name, "made up", {}, {}, files, 1) for name in depends}
    stages = {name: SimpleNamespace(config=SimpleNamespace(output=output)) for name, output in outputs.items()}
    found = read_result(
        SimpleNamespace(values={MARGIN: "1"}, stages=stages, depends=depends), "margin=1", [NDCG, RECALL]
    )
    assert found == Result("margin=1", {MARGIN: "1"}, {NDCG: 0.25, RECALL: 0.5}, 4.0)  # of two stages


def test_one_setting_has_no_plot():
    only = swept([result("0", "1", 0.25), result("0", "2", 0.75)])
    assert svg_of(only) == ""
    assert "test split" not in "".join(sweep_lines(only))
    assert sweep_section(only).lead == "margins: 1 setting, 2 trials"
