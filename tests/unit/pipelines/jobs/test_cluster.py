"""The cluster job in this process: what it writes and what it refuses."""

import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from pipelines.clustering.kmeans import DomainPairs, KMeansSettings, cluster_pairs, read_domain
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.clustering.points import Split
from pipelines.jobs import cluster, part_workers
from pipelines.jobs.cluster import Cluster, ClusterConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.relations import numbered_rows
from raytriever.stages.stage import Resources
from tests.unit.pipelines.jobs.batch_inputs import contents
from tests.unit.pipelines.jobs.paired_vectors import store, topics
from tests.unit.small_run import make

QUERIES, DOCUMENTS = topics(600, 12, 30)
DOMAINS = [("a", "b")[number % 3 == 0] for number in range(600)]


def stored(folder: Path, **changes: Any) -> dict[str, str]:
    return store(folder, **{"queries": QUERIES, "documents": DOCUMENTS, "domains": DOMAINS, **changes})


def read_clusters(artifact: Artifact) -> list[DomainPairs]:
    return [read_domain(artifact, number) for number in range(len(artifact.shards))]


def clustered(folder: Path, inputs: dict[str, str], **settings: Any) -> Artifact:
    return Artifact(make(Cluster(config(folder, inputs, **settings))))


def config(folder: Path, inputs: dict[str, str], **settings: Any) -> ClusterConfig:
    return ClusterConfig(output=str(folder / "clusters"), cluster_size=20, **inputs, **settings)


def test_domains_are_clustered_apart_as_the_plain_function_does(tmp_path: Path) -> None:
    artifact = clustered(tmp_path, stored(tmp_path), seed=3)
    domains = read_clusters(artifact)
    assert [shard.facts["domain"] for shard in artifact.shards] == ["a", "b"]
    for domain, shard in zip(domains, artifact.shards, strict=True):
        own = np.flatnonzero(np.array(DOMAINS) == shard.facts["domain"])
        assert domain.pairs.tolist() == own.tolist()
        k = -(-len(own) // 20)
        objective = shard.facts["objective"]
        assert len(objective) == shard.facts["iterations"] + 1
        assert shard.facts["clusters_asked_for"] == k == len(domain.centroids)
        mid_points = (DOCUMENTS[own].astype(float) + QUERIES[own]) / 2
        spread = np.square(mid_points - domain.centroids[domain.clusters]).sum()
        assert spread == pytest.approx(objective[-1], rel=1e-5)
    facts = artifact.manifest["facts"]
    assert (facts["sides"], facts["clusters_asked_for"], facts["pairs_with_zero_vectors"]) == ("both", 30, 0)
    assert artifact.manifest["counts"] == {"clusters": 30}


@pytest.mark.parametrize("small_domains", ["drop", "merge", "merge_all"])
def test_the_pairs_are_ordered_once_whatever_files_they_are_in(tmp_path, monkeypatch, small_domains) -> None:
    domains = [f"domain {'ab'[number % 2]}" for number in range(590)] + [f"small {number // 4}" for number in range(10)]
    ordered: list[int] = []

    def written(output: str, per_file: int) -> dict[str, bytes]:
        inputs = stored(tmp_path / output, domains=domains, per_file=per_file)
        clustered(tmp_path / output, inputs, smallest_domain=9, small_domains=small_domains)
        return contents(str(tmp_path / output / "clusters"))

    def number(*arguments: Any) -> Any:
        ordered.append(1)
        return numbered_rows(*arguments)

    monkeypatch.setattr(cluster, "numbered_rows", number)
    files = {name: data for name, data in written("one", 600).items() if name != "manifest.json"}
    assert len(ordered) == 1
    assert {name: data for name, data in written("nine", 70).items() if name != "manifest.json"} == files


def test_queries_alone_need_no_documents(tmp_path: Path) -> None:
    inputs = stored(tmp_path, documents=None, domains=["one"] * 600)
    artifact = clustered(tmp_path, inputs, kmeans={"sides": "queries"})
    (domain,) = read_clusters(artifact)
    distances = np.square(QUERIES.astype(float)[:, None] - domain.centroids).sum(axis=2)
    assert domain.clusters.tolist() == distances.argmin(axis=1).tolist()
    assert artifact.manifest["facts"]["sides"] == "queries"
    with pytest.raises(UserError, match="no vectors of documents"):
        clustered(tmp_path / "other", inputs)


def test_a_bad_vector_is_named_by_its_ids_and_zero_vectors_are_counted(tmp_path: Path) -> None:
    queries, documents = QUERIES.copy(), DOCUMENTS.copy()
    documents[[3, 4]] = 0
    queries[[4, 90]] = 0
    zeros = clustered(tmp_path, stored(tmp_path, queries=queries, documents=documents))
    assert zeros.manifest["facts"]["pairs_with_zero_vectors"] == 3
    documents[302, 5] = np.nan
    with pytest.raises(UserError, match=r"document vector of pair 302 \(query 'q302', document 'd297'\)"):
        clustered(tmp_path / "bad", stored(tmp_path / "bad", queries=queries, documents=documents))


def test_a_domain_of_one_pair_one_of_equal_vectors_and_none(tmp_path: Path) -> None:
    queries, documents = QUERIES.copy(), DOCUMENTS.copy()
    documents[1:], queries[1:] = documents[1], queries[1]
    inputs = stored(tmp_path, queries=queries, documents=documents, domains=["alone"] + ["equal"] * 599)
    artifact = clustered(tmp_path, inputs, smallest_domain=1)
    assert [np.bincount(domain.clusters).tolist() for domain in read_clusters(artifact)] == [[1], [599]]
    assert artifact.manifest["facts"]["clusters_asked_for"] == 31
    inputs = stored(tmp_path / "none", queries=queries[:0], documents=documents[:0], domains=[])
    with pytest.raises(UserError, match="holds no pairs"):
        Cluster(config(tmp_path / "none", inputs)).plan()
    few = Cluster(config(tmp_path, stored(tmp_path), smallest_domain=601))
    few.check_inputs({"vectors"})
    with pytest.raises(UserError, match="2 domains have fewer than 601 pairs"):  # as soon as there are pairs
        few.check_inputs({"pairs"})


@pytest.mark.parametrize(("changes", "message"), [
    ({"collection": "1" * 64}, "don't come from the same collection"),
    ({"queries": np.stack([QUERIES, QUERIES], axis=1)}, "2 vectors for each of its queries"),
    ({"documents": np.stack([DOCUMENTS, DOCUMENTS], axis=1)}, "2 vectors for each of its documents"),
])  # fmt: skip
def test_vectors_that_are_not_of_these_pairs_are_refused(tmp_path, changes, message) -> None:
    vectors = stored(tmp_path / "others", **changes)["vectors"]
    with pytest.raises(UserError, match=message):
        Cluster(config(tmp_path, stored(tmp_path) | {"vectors": vectors})).plan()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="torch finds none here"):
        clustered(tmp_path, stored(tmp_path), resources=Resources(gpus_per_worker=1))


@pytest.mark.parametrize("above", [2, 1000])
def test_the_plain_function_finds_the_same(tmp_path: Path, above: int) -> None:
    kmeans = KMeansSettings(two_level_above=above)
    artifact = clustered(tmp_path, stored(tmp_path, domains=["a"] * 600), kmeans=kmeans.model_dump())
    (domain,) = read_clusters(artifact)
    seed = 0 ^ 3904355907  # CRC-32 of 'a'
    found = cluster_pairs(ArrayPairs(queries=QUERIES, documents=DOCUMENTS), 30, kmeans, seed)
    assert domain.clusters.tolist() == found.assignments.tolist()
    assert domain.centroids.tobytes() == found.centroids.tobytes()
    assert json.dumps(artifact.manifest)  # plain values only


def test_after_an_error_no_other_domain_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Domains that are under way fail as soon as the workers are gone."""
    killed, begun = Event(), list[str]()
    ray = SimpleNamespace(remote=MagicMock(), kill=lambda _: killed.set())
    monkeypatch.setattr(part_workers, "ray", ray)
    monkeypatch.setattr(part_workers, "workers_that_fit", lambda *_: 1)

    def make(domain: str, _: Split) -> None:
        begun.append(domain)
        if domain == "a":
            raise ValueError("no good")
        assert killed.wait(10)

    with pytest.raises(ValueError, match="no good"), part_workers.PartWorkers(Resources(), 1, 1) as workers:
        list(workers.map_domains(make, "abcd"))
    assert begun in (["a"], ["a", "b"])
