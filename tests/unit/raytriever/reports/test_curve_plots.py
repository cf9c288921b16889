"""Curves over steps: their small computations against plain ones, and what a panel shows."""

from dataclasses import replace

import numpy as np
import pytest

from raytriever.reports.plots import Panel, curve_panels, running_mean, thin


def test_running_mean_is_the_mean_of_a_full_window_around_each_step() -> None:
    values = np.random.default_rng(1).normal(size=73)
    steps = np.arange(73, dtype=np.float64)
    expected = {step: np.mean(values[step - 3 : step + 4]) for step in range(3, 70)}  # 73 // 10 = 7 points
    np.testing.assert_allclose(running_mean(steps), list(expected), rtol=1e-12)
    np.testing.assert_allclose(running_mean(values), list(expected.values()), rtol=1e-12)


@pytest.mark.parametrize("points", [1, 2, 9, 10, 19])
def test_running_mean_of_few_points_is_the_points(points: int) -> None:
    values = np.arange(points, dtype=np.float64)
    np.testing.assert_array_equal(running_mean(values), values)


def test_long_curves_are_thinned_to_means() -> None:
    values = np.random.default_rng(2).normal(size=1200)
    np.testing.assert_allclose(thin(values), values.reshape(400, 3).mean(axis=1))
    assert len(thin(values[:1000])) == 400
    np.testing.assert_array_equal(thin(values[:400]), values[:400])
    assert len(curve_panels([Panel("loss", np.arange(100_000), np.ones(100_000))], "long")) < 100_000


def test_the_marked_step_is_set_off_once() -> None:
    panel = Panel("nDCG@10", np.array([0, 10, 20]), np.array([0.1, 0.3, 0.2]), smoothed=False)
    plain, marked, absent = (curve_panels([replace(panel, marked=step)], "plot") for step in (None, 10, 15))
    assert "#c8642b" not in plain
    assert "#c8642b" in marked
    assert absent == plain
