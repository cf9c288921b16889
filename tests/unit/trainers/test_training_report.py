"""What the report says of training, against its points."""

from typing import Any

import numpy as np
import pytest

from raytriever.retrieval.report import Section, Table
from raytriever.trainers.training_report import loss_sentence, training_section
from tests.unit.small_run import training_points


@pytest.fixture
def points() -> list[dict[str, Any]]:
    return training_points(60, np.random.default_rng(0))


def table_of(section: Section) -> Table:
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


def test_examples_rate_and_waiting(points: list[dict[str, Any]]) -> None:
    section = training_section(points, points, {"training": {"batches_per_step": 2, "bf16": True}})
    assert section is not None
    assert section.lead.startswith("60 steps over 480 examples.")
    assert "Training ran at 16.0 examples/s and waited for data 25.0% of the time." in section.lead
    assert table_of(section).caption == "Means over 6 steps (batches a step: 2, bfloat16 autocast, 0.50 s a step)."


def test_the_table_holds_means_of_both_ends(points: list[dict[str, Any]]) -> None:
    section = training_section(points, [], {})
    assert section is not None
    losses = [point["loss"] for point in points]
    rows = {str(row[0]): row[1:] for row in table_of(section).rows}
    assert rows["loss"] == [f"{np.mean(losses[:6]):.4f}", f"{np.mean(losses[-6:]):.4f}"]
    assert rows["gradient norm"] == ["3.0000", "3.0000"]
    assert "examples/s" not in section.lead


def test_a_metric_that_nobody_knows_is_shown_by_its_name(points: list[dict[str, Any]]) -> None:
    for point in points:
        point["share_of_things"] = 0.5
    section = training_section(points, [], {})
    assert section is not None
    assert [row[0] for row in table_of(section).rows][1:3] == ["accuracy (positive ranked first)", "share of things"]


def test_no_steps_no_section() -> None:
    assert training_section([], [], {}) is None


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_short_runs(steps: int) -> None:
    points = training_points(max(steps, 2), np.random.default_rng(0))[:steps]
    section = training_section(points, points, {})
    assert section is not None
    assert f"{points[0]['loss']:.3f} at the first step and {points[-1]['loss']:.3f} at the last" in section.lead


def test_a_change_is_claimed_only_beyond_twice_its_standard_error() -> None:
    noise = np.tile([-1.0, 1.0], 50)  # a tenth: mean 0, variance 10/9; standard error of the difference 0.471
    falling, level, rising = (noise + np.linspace(0, change, 100) for change in (-2.0, 0.5, 2.0))
    assert "falls from" in loss_sentence(falling)
    assert "rises from" in loss_sentence(rising)
    assert "within twice its standard error" in loss_sentence(level)
