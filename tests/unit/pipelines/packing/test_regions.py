"""Regions: equal in pairs, of near clusters, and a domain's packing in several."""

import numpy as np
import pytest

from pipelines.clustering import bisection
from pipelines.clustering.bisection import divide
from pipelines.packing import pack as module
from pipelines.packing.pack import PackingSettings, number_of_regions, pack

RANDOM = np.random.default_rng(4)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_regions_are_equal_in_pairs(number: int) -> None:
    sizes = RANDOM.integers(1, 100, 1000)
    found = divide(RANDOM.standard_normal((1000, 6)).astype(np.float32), sizes, number)
    pairs = np.bincount(found, sizes, minlength=number)
    assert abs(pairs - sizes.sum() / number).max() <= 99 * np.log2(max(number, 2))
    assert len(pairs) == number


def test_regions_are_of_near_clusters() -> None:
    blob = RANDOM.permutation(np.repeat(np.arange(4), 50))
    centres = 100 * np.array([[0, 0], [0, 1], [9, 0], [9, 1]])
    found = divide((centres[blob] + RANDOM.standard_normal((200, 2))).astype(np.float32), np.ones(200, int), 4)
    assert len(set(zip(found.tolist(), blob.tolist(), strict=True))) == 4


def test_many_pairs_in_one_cluster_and_equal_clusters() -> None:
    points = np.ones((5, 3), dtype=np.float32)
    assert sorted(divide(points, np.array([1, 1, 1000, 1, 1]), 5).tolist()) == [0, 1, 2, 3, 4]


def test_blocks_and_halves_of_numbers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = RANDOM.standard_normal((500, 8)).astype(np.float32)
    expected = divide(points, np.ones(500, int), 6)
    monkeypatch.setattr(bisection, "_BLOCK_ROWS", 7)
    np.testing.assert_array_equal(divide(points, np.ones(500, int), 6), expected)


def test_number_of_regions() -> None:
    most = module.CLUSTERS_OF_A_REGION
    assert number_of_regions(100, 10, 100) == 1
    assert number_of_regions(101, 10, 100) == 2
    assert number_of_regions(1000, 3, 100) == 3  # a cluster is not divided
    assert number_of_regions(most, most, 1 << 20) == 1
    assert number_of_regions(2 * most + 1, 2 * most + 1, 1 << 20) == 3


@pytest.mark.parametrize(("share", "aside"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_a_region_sets_aside_what_is_shuffled(share: float, aside: int) -> None:
    clusters = RANDOM.integers(0, 9, 50).astype(np.int32)
    points = RANDOM.standard_normal((9, 3)).astype(np.float32)
    chosen = PackingSettings(batch_size=4, shuffled=share)
    left_out = set[int]()
    for epoch in range(25):
        found = pack(clusters, points, chosen, 0, epoch, region=3)
        assert found.batches.shape == (12 - aside, 4)
        assert len(found.aside) == 4 * aside
        used = np.concatenate([found.batches.ravel(), found.aside])
        assert len(np.unique(used)) == 48
        left_out |= set(range(50)) - set(used.tolist())
    assert left_out == set(range(50))


def test_a_region_of_less_than_a_batch_has_none() -> None:
    found = pack(np.zeros(3, np.int32), np.ones((1, 2), np.float32), PackingSettings(batch_size=4), 0, 0, region=0)
    assert found.batches.shape == (0, 4)
    assert not len(found.aside)
