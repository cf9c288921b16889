"""Cells that are cut in two along the line through their means."""

import numpy as np
import pytest

from pipelines.clustering import lloyd


def test_every_point_has_its_place_along_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lloyd, "_ROWS_AT_ONCE", 3)
    points = np.outer(np.arange(5, 15), [3.0, 4.0]).astype(np.float32)
    steps = np.diff(lloyd._places_along(points, np.arange(10)))
    np.testing.assert_allclose(steps, steps[0], rtol=1e-5)
    assert abs(steps[0]) > 1
