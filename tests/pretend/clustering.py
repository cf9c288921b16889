"""k-means with its products on the pretend device: the clusters are the CPU's, and points go there once."""

from typing import Any

import numpy as np
import pytest
import torch

from pipelines.clustering import nearest_centroids
from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.clustering.points import LocalParts
from tests.pretend_device import NAME, counted_waits

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    "settings", [KMeansSettings(), KMeansSettings(two_level_above=8), KMeansSettings(pairs="concat")]
)
def test_clusters_are_those_of_the_cpu(settings: KMeansSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = RANDOM.normal(size=(2, 700, 12)).astype(np.float16).round(1)  # with ties
    monkeypatch.setattr(nearest_centroids, "PRODUCTS_ON_GPU", 1 << 12)
    found, expected = (
        cluster_pairs(
            ArrayPairs(queries=sides[0], documents=sides[1]), 20, settings, seed=1, split=LocalParts, device=device
        )
        for device in (NAME, "cpu")
    )
    np.testing.assert_array_equal(found.assignments, expected.assignments)
    assert found.objective == expected.objective
    assert len(found.objective) > 2


def test_points_that_are_held_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    move = torch.Tensor.to

    def noted(tensor: torch.Tensor, *where: Any) -> torch.Tensor:
        sizes.extend([tensor.numel()] if where == (NAME,) else [])
        return move(tensor, *where)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    sides = RANDOM.normal(size=(2, 700, 12)).astype(np.float32)
    with counted_waits() as waits:
        found = cluster_pairs(
            ArrayPairs(queries=sides[0], documents=sides[1]), 20, KMeansSettings(tolerance=0), seed=1, device=NAME
        )
    assert len(found.objective) > 4
    assert sizes.count(700 * 12) == 1
    assert sum(waits.values()) <= 8 * (len(found.objective) + 1), waits
