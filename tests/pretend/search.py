"""Exact search with its products on the pretend device: the ranking is the CPU's, and the host waits seldom."""

import numpy as np
import pytest

from retrieval.indexes import exact_search
from retrieval.indexes.exact_search import exact_top_k
from tests.pretend_device import NAME, counted_waits


def test_the_ranking_is_the_cpus_for_fewer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    queries, documents = (random.normal(size=(rows, 8)).astype(np.float16).round(1) for rows in (20, 9000))  # with ties
    expected, waits = exact_top_k(queries, documents, 30), []
    for tiles in (exact_search._TILES_ON_GPU, exact_search._TILES_AT_ONCE):
        monkeypatch.setattr(exact_search, "_TILES_ON_GPU", tiles)
        with counted_waits() as counted:
            found = exact_top_k(queries, documents, 30, device=NAME)
        np.testing.assert_array_equal(found.rows, expected.rows)
        np.testing.assert_array_equal(found.scores, expected.scores)
        waits.append(counted.total())
    assert 2 * waits[0] <= waits[1]
