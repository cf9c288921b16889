"""What the report says of training, against its points."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytriever.artifacts.artifact import Artifact
from raytriever.reports.plots import Panel
from raytriever.reports.report import Plot, Section, render
from raytriever.reports.table import Cell, Table
from tests.unit.small_run import LEDGER, make_artifact, training_points
from trainers.engine.early_stopping import Criterion, Evaluation
from trainers.record import report_section
from trainers.record.report_section import training_section, training_section_of

EVALUATIONS = [
    Evaluation(step, {"RR@10": value / 2, "nDCG@10": value}, 10.0)
    for step, value in ((0, 0.30), (10, 0.35), (20, 0.42), (30, 0.41), (40, 0.415), (50, 0.40))
]
CRITERIA = [Criterion("nDCG@10", higher_is_better=True)]


@pytest.fixture
def points() -> list[dict[str, Any]]:
    return training_points(60, np.random.default_rng(0))


def tables_of(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def plots_of(section: Section) -> list[Plot]:
    return [block for block in section.blocks if isinstance(block, Plot)]


def rows_of(table: Table) -> dict[str, list[str]]:
    return {str(row[0]): [cell.text if isinstance(cell, Cell) else cell for cell in row[1:]] for row in table.rows}


def test_rates_and_means_of_both_ends(points: list[dict[str, Any]]) -> None:
    points = [point | {"gradient_norm": 20_001.1234} for point in points]
    section = training_section(points, points, LEDGER)
    steps, _ledger = tables_of(section)  # as nothing was validated
    assert section.lead.startswith("60 steps over 480 examples.")
    assert steps.caption.startswith("Means over 6 steps. 0.50 s a step, 16.0 examples/s, 400 tokens/s, ")
    assert steps.caption.endswith(", 25.0% of the time waiting for data.")
    losses, rows = [point["loss"] for point in points], rows_of(steps)
    assert rows["loss"] == [f"{np.mean(losses[:6]):.4f}", f"{np.mean(losses[-6:]):.4f}"]
    assert rows["gradient norm"] == ["20001.1234", "20001.1234"]
    assert "examples/s" not in tables_of(training_section(points, [], LEDGER))[0].caption


def test_a_metric_that_nobody_knows_has_a_row_and_a_panel_by_its_name(points: list[dict[str, Any]]) -> None:
    for point in points:
        point |= {"share_of_things": 0.5, "target_min": 0.2}
    section = training_section(points, [], LEDGER)
    names = [row[0] for row in tables_of(section)[0].rows]
    assert names[1:4] == ["accuracy (positive ranked first)", "share of things", "target min"]
    (plot,) = plots_of(section)
    assert plot.svg.count(">target min<") == 1


def test_validation_shows_start_best_and_last_and_what_the_best_took(points: list[dict[str, Any]]) -> None:
    points = points[:50]
    section = training_section(points, points, LEDGER, EVALUATIONS, CRITERIA)
    table = tables_of(section)[0]
    assert table.header == ["measure", "start (step 0)", "best (step 20)", "last (step 50)"]
    assert [row[0] for row in table.rows[:2]] == ["nDCG@10", "RR@10"]  # what decides is the first
    assert [cell.is_strong for cell in table.rows[0][1:] if isinstance(cell, Cell)] == [False, True, False]
    assert [part.text_columns for part in tables_of(section)] == [1, 1, 2]
    assert (
        rows_of(table).items()
        >= {
            "nDCG@10": ["0.3000", "0.4200", "0.4000"],
            "RR@10": ["0.1500", "0.2100", "0.2000"],
            "examples seen": ["0", "160", "400"],
            "time in training": ["0.0 s", "10.0 s", "25.0 s"],
            "time in validation": ["10.0 s", "30.0 s", "1 min 00 s"],
        }.items()
    )
    assert section.lead.endswith("Stopped early, at step 50 of 90: 3 evaluations without improvement.")
    to_its_end = training_section(points, [], LEDGER | {"steps": 50}, EVALUATIONS, CRITERIA)
    assert "Stopped early" not in to_its_end.lead
    assert "nDCG@10" in plots_of(section)[0].svg
    (caption,) = [plot.caption for plot in plots_of(section) if "Orange" in plot.caption]
    assert caption.startswith("Measures of validation by the steps done. Orange: step 20,")  # what on, it isn't told
    assert tables_of(section)[-1].rows[0][0] == "steps"


def test_steps_are_smoothed_and_evaluations_are_dots_with_the_best_marked(points, monkeypatch) -> None:
    drawn, epoch_ends = list[Panel](), list[float]()

    def draw(panels: list[Panel], _: str, ends: Sequence[float] = ()) -> str:
        drawn.extend(panels)
        epoch_ends.extend(ends)
        return "<svg/>"

    monkeypatch.setattr(report_section, "curve_panels", draw)
    training_section(points, [], LEDGER, EVALUATIONS, CRITERIA)
    assert [(each.title, each.smoothed, each.dots, each.marked) for each in drawn[:4]] == [
        ("loss", True, False, None),
        ("learning rate", False, False, None),
        ("accuracy (positive ranked first)", True, False, None),
        ("nDCG@10", False, True, 20),
    ]
    assert epoch_ends == [30.5]


@pytest.mark.parametrize(
    ("steps", "count", "header"),
    [(60, 3, ["measure", "start (step 0)", "best (step 20)"]), (3, 1, ["measure", "start (step 0)"])],
    ids=["the best at the end", "an untrained one alone"],
)
def test_an_evaluation_is_named_once(points: list[dict[str, Any]], steps: int, count: int, header: list[str]) -> None:
    section = training_section(points[:steps], [], LEDGER, EVALUATIONS[:count], CRITERIA)
    assert tables_of(section)[0].header == header


def test_of_a_loss_less_is_better_and_other_measures_come_and_go(points: list[dict[str, Any]]) -> None:
    evaluations = [
        Evaluation(20, {"loss": 0.9}),
        Evaluation(40, {"loss": 0.8, "average_rank": 7.0}),
        Evaluation(60, {"loss": 1.0, "average_rank": 6.0}),
    ]
    criteria = [Criterion("loss", higher_is_better=False)]
    table, *_ = tables_of(training_section(points, [], LEDGER, evaluations, criteria))
    assert table.header[2] == "best (step 40)"
    assert rows_of(table)["average_rank"] == ["not measured", "7.0000", "6.0000"]


def test_of_an_artifact_all_files_are_read(tmp_path: Path, points: list[dict[str, Any]]) -> None:
    def lines(rows: list[dict[str, Any]]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    evaluations = [{"step": e.step, "epoch": 0, "measures": e.measures} for e in EVALUATIONS]
    files = {
        "training.jsonl": lines(points), "evaluations.jsonl": lines(evaluations), "ledger.json": json.dumps(LEDGER),
    }  # fmt: skip
    facts = {"criteria": [{"measure": "nDCG@10", "higher_is_better": True, "start": 0}]}
    artifact = Artifact(make_artifact(tmp_path / "new", "model", {}, facts, files, 1))
    assert "examples/s" not in tables_of(training_section_of(artifact))[1].caption  # without a log
    timed = [evaluation | {"seconds": 5.0} for evaluation in evaluations]
    (tmp_path / "new" / "log.jsonl").write_text(lines([*timed, *points]))
    section = training_section_of(artifact)
    validation, steps, _ledger = tables_of(section)
    assert rows_of(validation)["time in validation"] == ["5.0 s", "15.0 s", "30.0 s"]
    assert "16.0 examples/s" in steps.caption
    assert "nan" not in render("run", "report", [section])
