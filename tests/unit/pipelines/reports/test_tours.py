"""The literal tour against the definition and against the fast one; what is said of lengths and swaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.clustering.clusters import DomainClusters, read_clusters
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.packing.neighbours import EXACT_UP_TO, find_neighbours
from pipelines.packing.pack import PackingSettings
from pipelines.packing.tour import greedy_tour
from pipelines.reports.packings import literal_length, literal_tour, polish_sentence, tour_blocks, tour_sentence
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.table import Table
from tests.unit.small_run import BATCH_SIZE, make, make_run


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**16))
@settings(deadline=None, max_examples=40)
def test_the_literal_tour_is_greedy_and_the_fast_one_equals_it(size: int, width: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    centroids = generator.normal(size=(size, width)).astype(np.float32)
    start = int(generator.integers(size))
    order = literal_tour(centroids, start)
    assert order[0] == start
    assert sorted(order) == list(range(size))
    for step in range(size - 1):
        distances = np.linalg.norm(centroids[order[step + 1 :]].astype(float) - centroids[order[step]], axis=1)
        assert distances[0] == pytest.approx(distances.min(), abs=1e-12)
    np.testing.assert_array_equal(greedy_tour(find_neighbours(centroids, EXACT_UP_TO), start).order, order)


def test_ties_go_to_the_lowest_index() -> None:
    assert literal_tour(np.array([[0.0], [1.0], [-1.0], [1.0]]), 0).tolist() == [0, 1, 3, 2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_run(tmp_path_factory.mktemp("report") / "run")


def read(run: dict[str, str]) -> list[DomainClusters]:
    return read_clusters(Artifact(run["clusters"]))


def test_the_packings_tours_are_as_long_as_literal_ones(run: dict[str, str]) -> None:
    packing = Artifact(run["packing"])
    for shard in packing.shards:
        length = literal_length(packing, read(run), shard.facts["epoch"])
        assert shard.facts["tour"]["length"] == pytest.approx(length, abs=1e-5)
    sentence, table = tour_blocks(packing, read(run))
    assert "gives the same length" in str(sentence)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["0", "1"]


def test_too_many_clusters_are_not_walked_literally(run: dict[str, str]) -> None:
    many = DomainClusters("", np.empty(0, int), np.empty(0, np.int32), np.zeros((2049, 1), np.float32))
    assert literal_length(Artifact(run["packing"]), [many], 0) is None
    sentence = str(tour_blocks(Artifact(run["packing"]), [many])[0])
    assert "Neighbours were exact" in sentence


def test_a_random_order_has_no_tour(run: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = PackingSettings(batch_size=BATCH_SIZE, order="random")
    folder = tmp_path_factory.mktemp("random") / "packing"
    packing = Artifact(make(Pack(PackConfig(clusters=run["clusters"], packing=settings, output=str(folder)))))
    assert tour_blocks(packing, read(run)) == []


def test_sentences() -> None:
    tour = {"length": 30.0, "random_length": 60.0, "steps": 9}
    assert "9 steps add up to 30.00, 50% of what" in tour_sentence(tour, None, exact=False)
    assert "HNSW" in tour_sentence(tour, None, exact=False)
    assert "24.00 (+25.00% for the one stored)" in tour_sentence(tour, 24.0, exact=False)
    assert "one cluster" in tour_sentence(tour | {"steps": 0}, 0.0, exact=True)
    polish = {"hardness_before": 0.2, "hardness_after": 0.25, "swaps": [7, 1]}
    assert "8 in 2 sweeps, take the mean hardness from 0.2000 to 0.2500 (+25.0%)." in polish_sentence(polish)
