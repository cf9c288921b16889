"""Clustering a large domain on Ray: the same bytes for any number of workers, and when some of them die."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest

from pipelines.clustering import points as parts
from pipelines.clustering.kmeans import Clustering, KMeansSettings, cluster_pairs
from pipelines.clustering.pair_vectors import PairVectors, StoredPairs
from pipelines.clustering.points import LocalParts, Split
from pipelines.jobs import cluster as job
from pipelines.jobs.cluster import Cluster, ClusterConfig
from raytriever.errors import UserError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources
from retrieval.vectors import StoredVectors
from tests.cluster.stored_bytes import hashes
from tests.unit.pipelines.jobs.paired_vectors import store, topics
from tests.unit.small_run import make

PAIRS = 1000
KINDS = {
    "flat": KMeansSettings(iterations=6, restarts=2),
    "in two levels": KMeansSettings(two_level_above=5),
    "concatenated": KMeansSettings(pairs="concat", iterations=3),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    domains = ["large"] * (PAIRS - 100) + ["small"] * 100
    queries, documents = topics(PAIRS, 16, 40)
    return store(tmp_path_factory.mktemp("inputs"), queries=queries, documents=documents, domains=domains)


def stored(inputs: dict[str, str]) -> StoredPairs:
    rows = np.arange(PAIRS)
    return StoredPairs(StoredVectors(inputs["vectors"]), query_rows=rows, document_rows=rows[::-1])


def clustered(pairs: PairVectors, kind: str, split: Split) -> Clustering:
    return cluster_pairs(pairs, 50, KINDS[kind], 7, split)


def values(clustering: Clustering) -> tuple[Any, ...]:
    return (
        clustering.assignments.tobytes(),
        clustering.centroids.tobytes(),
        tuple(f"{cost:.9g}" for cost in clustering.objective),  # as it is recorded
        clustering.refilled,
    )


@pytest.fixture(scope="module")
def workers(session: RaySession) -> Iterator[Any]:  # noqa: ARG001
    """Four, which take long to start, for all tests that kill none."""
    from pipelines.jobs.part_workers import PartWorkers

    with PartWorkers(Resources(workers=4, cpus_per_worker=0.25), workers_of_a_domain=2, most_at_once=8) as workers:
        yield workers


@pytest.fixture(scope="module")
def expected(inputs: dict[str, str]) -> dict[str, tuple[Any, ...]]:
    return {kind: values(clustered(stored(inputs), kind, LocalParts)) for kind in KINDS}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_clustering_does_not_depend_on_parts_and_workers(inputs, workers, expected, monkeypatch, number):
    from pipelines.jobs.part_workers import RayParts

    monkeypatch.setattr(parts, "PART_POINTS", 128)
    splits = count(1000 * number)  # a number of its own for each, by which workers know what they hold

    chosen = workers._actors[:number]
    assert len(chosen) == number

    def split(points):
        return RayParts(points, chosen, (0, next(splits)))

    for kind, values_expected in expected.items():
        assert values(clustered(stored(inputs), kind, split)) == values_expected, kind


def test_domains_side_by_side_are_clustered_as_one_by_one(inputs, workers, expected, monkeypatch):
    monkeypatch.setattr(parts, "PART_POINTS", 128)
    threads, both = set(), Barrier(2, timeout=60)

    def make(kind: str, split: Split) -> tuple[str, tuple[Any, ...]]:
        threads.add(get_ident())
        if kind != "concatenated":
            both.wait()  # the first two are under way at once
        return kind, values(clustered(stored(inputs), kind, split))

    assert dict(workers.map_domains(make, list(KINDS))) == expected
    assert len(threads) == 2


def stage(inputs: dict[str, str], folder: Path) -> Cluster:
    settings = {
        "cluster_size": 20,
        "kmeans": KINDS["in two levels"],
        "resources": Resources(workers=2, cpus_per_worker=0.5),
    }
    return Cluster(ClusterConfig.model_validate({**inputs, **settings, "output": str(folder)}))


def test_workers_that_die_change_no_byte(session, inputs, tmp_path, monkeypatch):
    import ray

    from pipelines.jobs.part_workers import RayParts

    make(stage(inputs, tmp_path / "in this process"))
    monkeypatch.setattr(job, "LARGE_DOMAIN", 50)
    monkeypatch.setattr(job, "WORKERS_OF_A_DOMAIN", 1)  # both domains at once
    monkeypatch.setattr(parts, "PART_POINTS", 32)
    passes: list[int] = []
    map_parts = RayParts.map

    def map_and_kill(self, *arguments, **named):
        passes.append(len(self.points))
        number = len(passes)
        for place, found in enumerate(map_parts(self, *arguments, **named)):
            if place == 1 and number in (1, 9):
                ray.kill(self._actors[number // 8], no_restart=False)
            yield found

    monkeypatch.setattr(RayParts, "map", map_and_kill)
    run_stage(stage(inputs, tmp_path / "on Ray"), session)
    assert hashes(tmp_path / "on Ray") == hashes(tmp_path / "in this process")
    assert len(passes) > 9


def test_an_error_on_a_worker_is_shown_as_it_is(inputs, workers, tmp_path):
    queries, documents = topics(PAIRS, 16, 40)
    queries[7] = np.inf
    bad = store(tmp_path, queries=queries, documents=documents, domains=["large"] * PAIRS)
    with pytest.raises(UserError, match="query vector of pair 7 "):
        clustered(stored(bad), "flat", workers.split)
    with pytest.raises(UserError, match="A GPU was asked for"):
        cluster_pairs(stored(inputs), 50, KINDS["flat"], 7, workers.split, device="cuda")


def test_a_domain_that_fails_ends_the_others(session, inputs):  # noqa: ARG001
    from pipelines.jobs.part_workers import PartWorkers

    begun = Barrier(2, timeout=60)

    def make(kind: str, split: Split) -> None:
        begun.wait()
        while kind == "goes on":
            clustered(stored(inputs), "flat", split)
        raise UserError("No.")

    with (
        pytest.raises(UserError, match=r"^No\.$"),
        PartWorkers(Resources(workers=2, cpus_per_worker=0.25), 1, 8) as workers,
    ):
        list(workers.map_domains(make, ["goes on", "fails", "never begins"]))
