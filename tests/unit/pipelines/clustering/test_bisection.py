"""Cells that are cut in two along the line through their means."""

import hashlib

import numpy as np
import pytest

from pipelines.clustering import lloyd


def test_every_point_has_its_place_along_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lloyd, "_ROWS_AT_ONCE", 3)
    points = np.outer(np.arange(5, 15), [3.0, 4.0]).astype(np.float32)
    steps = np.diff(lloyd._places_along(points, np.arange(10)))
    np.testing.assert_allclose(steps, steps[0], rtol=1e-5)
    assert abs(steps[0]) > 1


def test_the_parts_of_points_are_these_very_ones() -> None:
    random = np.random.default_rng(0)
    points, sizes = random.integers(-3, 4, (9000, 3)).astype(np.float32), random.integers(1, 100, 9000)
    points *= 2**17
    found = lloyd.divide(points, sizes, 7)
    assert hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest() == "285fb20797939306"
