"""Exact search with its products on the pretend device: the ranking is the CPU's, and the host waits seldom."""

from typing import Any

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
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
    assert waits == [8, 12]  # two for tiles whose best are picked together, and for uploads, lengths and the result six


def test_vectors_go_there_as_they_are_stored_and_are_checked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.dtype, int]] = []
    move = torch.Tensor.to

    def noted(tensor: torch.Tensor, *where: Any) -> torch.Tensor:
        sent.extend([(tensor.dtype, len(tensor))] if where == (NAME,) else [])
        return move(tensor, *where)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    queries, documents = np.ones((3, 8), np.float16), np.ones((3000, 8), np.float16)
    exact_top_k(queries, documents, 2, device=NAME)
    assert sent == [(torch.float16, 3), (torch.float16, 3000)]
    documents[2345, 1] = np.inf
    monkeypatch.setattr(np, "einsum", None)
    with pytest.raises(UserError, match="Vector 2345 of documents holds NaN or infinity"):
        exact_top_k(queries, documents, 2, device=NAME)
    with pytest.raises(UserError, match=r"queries: a vector is 2\.83e\+18 long"):
        exact_top_k(np.full((1, 8), 1e18, np.float32), documents, 2, device=NAME)
