"""Packing large domains, grouping and BM25, by many tasks: the same bytes for any number of workers, when some die."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.pack import Pack
from pipelines.jobs.row_batches import Group
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Stage
from retrieval.jobs.index import Index
from tests.cluster.journaled import Killed, notes
from tests.cluster.stored_bytes import hashes
from tests.unit.pipelines.jobs.paired_vectors import store, topics
from tests.unit.pipelines.jobs.test_group import SOURCES, chunks_of, collection_of
from tests.unit.small_run import make

pytestmark = pytest.mark.slow  # of each one, two and four workers, and a killed one: a minute and a half

PAIRS = 600


class KilledPack(Killed, Pack):
    killed_at = ("placed", "parts-00001-00002", "shares-00001-00001", "epoch-00000")


class KilledRandomPack(Killed, Pack):
    killed_at = ("placed", "parts-00000-00001")


class KilledCluster(Killed, Cluster):
    killed_at = ("by_domain", "00001")


class SmallOrders(Group):
    rows_of_an_order = 16


class KilledGroup(Killed, SmallOrders):
    killed_at = ("stretches", "order-00000-00001", "epoch=00001-00002")


class KilledIndex(Killed, Index):
    killed_at = ("counts-00001", "sums", "00002")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    queries, documents = topics(PAIRS, 16, 40)
    domains = ["large"] * (PAIRS - 100) + ["small"] * 100
    inputs = store(folder, queries=queries, documents=documents, domains=domains, per_file=300)
    config = ClusterConfig(**inputs, cluster_size=4, smallest_domain=4, output=str(folder / "c"))
    packing = {"batch_size": 4, "region_pairs": 120, "polish_sweeps": 1, "shuffled": [0, 0.3]}
    return {**inputs, "clusters": make(Cluster(config)), "packing": packing, "epochs": 2}


def made(stage: type[Stage[Any]], settings: dict[str, Any], output: Path, session: Any, workers: int) -> dict[str, str]:
    resources = {"workers": workers, "cpus_per_worker": 0.5}
    config = stage.config_class.model_validate({**settings, "output": str(output), "resources": resources})
    run_stage(stage(config), session)
    return hashes(output)


def check(kind: type[Stage[Any]], killed: Any, settings: dict[str, Any], folder: Path, session: Any) -> Counter[str]:
    """The bytes of 1, 2 and 4 workers, and of killed ones; how often each shard was begun then."""
    expected = made(kind, settings, folder / "one", session, 1)
    for workers in (2, 4):
        assert made(kind, settings, folder / str(workers), session, workers) == expected
    assert made(killed, settings, folder / "killed" / "out", session, 2) == expected
    begun = Counter(line.shard for line in notes(folder / "killed" / "journal"))
    assert {name: times for name, times in begun.items() if times > 1} == dict.fromkeys(killed.killed_at, 2)
    return begun


def test_regions_of_a_domain(settings, session, tmp_path):
    begun = check(Pack, KilledPack, settings, tmp_path, session)
    assert sum("parts" in name for name in begun) == 2 * (5 + 1)
    assert sum("shares" in name for name in begun) == 5  # of the epoch that shuffles some


def test_regions_without_clusters(settings, session, tmp_path):
    random = {"pairs": settings["pairs"], "packing": {"batch_size": 4, "order": "random", "region_pairs": 120}}
    begun = check(Pack, KilledRandomPack, random, tmp_path, session)
    assert sum("parts" in name for name in begun) == 5 + 1


def test_the_order_of_a_clustering(settings, session, tmp_path):
    asked = {name: settings[name] for name in ("pairs", "vectors")} | {"cluster_size": 4, "smallest_domain": 4}
    check(Cluster, KilledCluster, asked, tmp_path, session)


def test_sections_of_a_group(session, tmp_path):
    collection = collection_of(tmp_path / "collection", chunks_of(SOURCES))
    settings = {"collection": collection, "epochs": 2, "small_domains": "drop", "grouping": {"batch_size": 4},
                "batches_per_shard": 3}  # fmt: skip
    begun = check(SmallOrders, KilledGroup, settings, tmp_path, session)
    assert sum("order" in name for name in begun) > 2 * 2


def test_parts_of_a_lexical_index(session, tmp_path):
    collection = collection_of(tmp_path / "collection", chunks_of(SOURCES))
    settings = {"index": {"kind": "lexical", "collection": collection, "documents_per_shard": 20}}
    begun = check(Index, KilledIndex, settings, tmp_path, session)
    assert len(begun) > 3
