"""What the report says of training, against its points."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Plot, Section, render
from raytriever.reports.table import Cell, Table
from tests.unit.small_run import LEDGER, make_artifact, training_points
from trainers.engine.early_stopping import Criterion, Evaluation
from trainers.record.report_section import training_section, training_section_of


@pytest.fixture
def points() -> list[dict[str, Any]]:
    return training_points(60, np.random.default_rng(0))


def table_of(section: Section) -> Table:
    """That of the steps, where nothing was validated."""
    table, _ledger = (block for block in section.blocks if isinstance(block, Table))
    return table


def test_examples_rate_and_waiting(points: list[dict[str, Any]]) -> None:
    section = training_section(points, points, LEDGER)
    assert section.lead.startswith("60 steps over 480 examples.")
    caption = table_of(section).caption
    assert caption.startswith("Means over 6 steps. 0.50 s a step, 16.0 examples/s, 400 tokens/s, ")
    assert caption.endswith(", 25.0% of the time waiting for data.")


def test_the_table_holds_means_of_both_ends(points: list[dict[str, Any]]) -> None:
    section = training_section(points, [], LEDGER)
    losses = [point["loss"] for point in points]
    rows = {str(row[0]): row[1:] for row in table_of(section).rows}
    assert rows["loss"] == [f"{np.mean(losses[:6]):.4f}", f"{np.mean(losses[-6:]):.4f}"]
    assert rows["gradient norm"] == ["3.0000", "3.0000"]
    assert "examples/s" not in table_of(section).caption


def test_a_metric_that_nobody_knows_is_shown_by_its_name(points: list[dict[str, Any]]) -> None:
    for point in points:
        point["share_of_things"] = 0.5
    section = training_section(points, [], LEDGER)
    assert [row[0] for row in table_of(section).rows][1:3] == ["accuracy (positive ranked first)", "share of things"]


EVALUATIONS = [
    Evaluation(step, {"nDCG@10": value, "RR@10": value / 2}, 10.0)
    for step, value in ((0, 0.30), (10, 0.35), (20, 0.42), (30, 0.41), (40, 0.415), (50, 0.40))
]
CRITERIA = [Criterion("nDCG@10", higher_is_better=True)]


def tables_of(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def plots_of(section: Section) -> list[str]:
    return [block.svg for block in section.blocks if isinstance(block, Plot)]


def text_of(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def test_validation_shows_start_best_and_last_and_what_the_best_took(points: list[dict[str, Any]]) -> None:
    points = points[:50]
    section = training_section(points, points, LEDGER, EVALUATIONS, CRITERIA)
    table = tables_of(section)[0]
    assert table.header == ["measure", "start (step 0)", "best (step 20)", "last (step 50)"]
    rows = {str(row[0]): [text_of(cell) for cell in row[1:]] for row in table.rows}
    assert rows["nDCG@10"] == ["0.3000", "0.4200", "0.4000"]
    assert rows["RR@10"] == ["0.1500", "0.2100", "0.2000"]
    assert rows["examples seen"] == ["0", "160", "400"]
    assert rows["time in training"] == ["0.0 s", "10.0 s", "25.0 s"]
    assert rows["time in validation"] == ["10.0 s", "30.0 s", "1 min 00 s"]
    assert section.lead.endswith("Stopped early, at step 50 of 90: 3 evaluations without improvement.")
    assert "nDCG@10" in plots_of(section)[0]
    (caption,) = [block.caption for block in section.blocks if isinstance(block, Plot) and "Orange" in block.caption]
    assert caption.startswith("Measures of validation by the steps done. Orange: step 20,")  # what on, it isn't told
    assert tables_of(section)[-1].rows[0][0] == "steps"


def test_a_run_to_its_end_did_not_stop_early(points: list[dict[str, Any]]) -> None:
    section = training_section(points, [], LEDGER | {"steps": 60}, EVALUATIONS, CRITERIA)
    assert "Stopped early" not in section.lead


def test_the_best_at_the_end_is_named_once(points: list[dict[str, Any]]) -> None:
    section = training_section(points, [], LEDGER, EVALUATIONS[:3], CRITERIA)
    assert tables_of(section)[0].header == ["measure", "start (step 0)", "best (step 20)"]


def test_of_a_loss_less_is_better_and_other_measures_come_and_go(points: list[dict[str, Any]]) -> None:
    evaluations = [
        Evaluation(20, {"loss": 0.9}),
        Evaluation(40, {"loss": 0.8, "average_rank": 7.0}),
        Evaluation(60, {"loss": 1.0, "average_rank": 6.0}),
    ]
    criteria = [Criterion("loss", higher_is_better=False)]
    section = training_section(points, [], LEDGER, evaluations, criteria)
    rows = {str(row[0]): [text_of(cell) for cell in row[1:]] for row in tables_of(section)[0].rows}
    assert tables_of(section)[0].header[2] == "best (step 40)"
    assert rows["average_rank"] == ["not measured", "7.0000", "6.0000"]


def test_an_untrained_evaluation_alone_is_shown(points: list[dict[str, Any]]) -> None:
    section = training_section(points[:3], [], LEDGER, EVALUATIONS[:1], CRITERIA)
    assert tables_of(section)[0].header == ["measure", "start (step 0)"]


def test_each_metric_of_an_objective_has_a_panel(points: list[dict[str, Any]]) -> None:
    for point in points:
        point["target_min"] = 0.2
    section = training_section(points, [], LEDGER)
    (svg,) = plots_of(section)
    assert svg.count(">target min<") == 1
    assert [row[0] for row in table_of(section).rows][2] == "target min"


def test_of_an_artifact_all_files_are_read(tmp_path: Path, points: list[dict[str, Any]]) -> None:
    def lines(rows: list[dict[str, Any]]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    evaluations = [{"step": e.step, "epoch": 0, "measures": e.measures} for e in EVALUATIONS]
    files = {
        "training.jsonl": lines(points), "evaluations.jsonl": lines(evaluations), "ledger.json": json.dumps(LEDGER),
    }  # fmt: skip
    facts = {"criteria": [{"measure": "nDCG@10", "higher_is_better": True, "start": 0, "minimum_change": 0.0}]}
    artifact = Artifact(make_artifact(tmp_path / "new", "model", {}, facts, files, 1))
    assert "examples/s" not in tables_of(training_section_of(artifact))[1].caption  # without a log
    timed = [evaluation | {"seconds": 5.0} for evaluation in evaluations]
    (tmp_path / "new" / "log.jsonl").write_text(lines([*points, *timed]))
    section = training_section_of(artifact)
    validation, steps, _ledger = tables_of(section)
    assert [text_of(cell) for cell in validation.rows[-1]] == ["time in validation", "5.0 s", "15.0 s", "30.0 s"]
    assert "16.0 examples/s" in steps.caption
    assert "nan" not in render("run", "report", [section])
