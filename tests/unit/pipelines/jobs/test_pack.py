"""`raytriever pack`: with clusters, without, and what it refuses."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.clustering.kmeans import CLUSTERS, read_centroids, read_domain
from pipelines.jobs import pack as module
from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.pack import Pack, PackConfig, Part, parts_of
from pipelines.packing.pack import PackingSettings, pack
from pipelines.pairs.pairs import PAIRS, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from tests.unit import small_run as small
from tests.unit.pipelines.jobs.paired_vectors import store, topics

SIZE = 4


@pytest.fixture(scope="module")
def run(small_run: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: small_run[name] for name in ("vectors", "pairs")}
    output = str(tmp_path_factory.mktemp("run") / "clusters")
    settings: dict[str, Any] = {"kmeans": {"sides": "queries"}, "cluster_size": 5, "smallest_domain": SIZE}
    queries = small.make(Cluster(ClusterConfig(**made, **settings, output=output)))
    return made | {"pairs_clusters": small_run["clusters"], "queries_clusters": queries}


def all_of(run: dict[str, str]) -> dict[str, Any]:
    """Everything that packing may take, and two epochs."""
    return {"clusters": run["pairs_clusters"], "pairs": run["pairs"], "vectors": run["vectors"], "epochs": 2}


def packed(folder: Path, **settings: Any) -> Artifact:
    packing = {"batch_size": SIZE} | settings.pop("packing", {})
    values = {"packing": packing, "output": str(folder)} | settings
    return Artifact(small.make(Pack(PackConfig.model_validate(values))))


def epoch_of(artifact: Artifact, epoch: int) -> pa.Table:
    table = pa.concat_tables(pq.read_table(artifact.path(file.name)) for file in artifact.shards[epoch].files)
    assert table.schema.equals(pa.schema([("pair", pa.int64()), ("cluster", pa.int32()), ("domain", pa.string())]))
    return table


def check(artifact: Artifact, pairs: str, epoch: int = 0, *, pure: bool = True) -> pa.Table:
    table = epoch_of(artifact, epoch)
    numbers, files = table["pair"].to_numpy(), artifact.shards[epoch].files
    assert len(set(numbers.tolist())) == artifact.shards[epoch].facts["pairs"]  # every one
    assert len(numbers) % SIZE == 0
    of_domains = {*table["domain"].to_pylist()}
    assert len(numbers) - len(set(numbers.tolist())) < SIZE * (len(files) + len(of_domains))
    own = np.array(read_pairs(Artifact(pairs, PAIRS), ["domain"])["domain"].to_pylist(), dtype=object)[numbers]
    assert own.tolist() == table["domain"].to_pylist()
    batches = own.reshape(-1, SIZE)
    assert (batches == batches[:, :1]).all() == pure
    return table


def test_random_batches_need_no_clusters(run: dict[str, str], tmp_path: Path) -> None:
    found = packed(tmp_path, pairs=run["pairs"], packing={"order": "random"}, epochs=3)
    tables = [check(found, run["pairs"], epoch) for epoch in range(3)]
    assert found.rows == sum(map(len, tables)) == 3 * small.PAIRS  # 16 and 32 pairs: none is left out
    assert not found.manifest["dropped"]
    assert all(set(table["cluster"].to_pylist()) == {-1} for table in tables)
    assert tables[0]["pair"] != tables[1]["pair"]
    origins = {"pairs": Artifact(run["pairs"]).fingerprint}
    assert found.manifest["facts"] == {"origins": origins, "clusters": {}}


def test_small_domains_are_dropped_or_merged_or_refused(run: dict[str, str], tmp_path: Path) -> None:
    random = {"order": "random", "batch_size": 20}
    with pytest.raises(UserError, match=r"fewer than 20 pairs.*\(16\)"):
        packed(tmp_path / "a", pairs=run["pairs"], packing=random)
    found = packed(tmp_path / "b", pairs=run["pairs"], packing=random, small_domains="drop")
    assert Counter(epoch_of(found, 0)["domain"].to_pylist()) == {"plain": 40}  # 32, and 8 of them once more
    assert found.manifest["dropped"] == {"pairs of small domains": 16}
    clustered: Any = SimpleNamespace(manifest={"counts": {"clusters": 2}, "dropped": {}}, rows=40, shards=[0])
    stage = Cluster(ClusterConfig(pairs=run["pairs"], vectors=run["vectors"], output=""))
    assert stage.summary(clustered) == "40 pairs in 2 clusters of 1 domain"
    clustered.manifest["dropped"] = {"pairs of small domains": 16}
    assert stage.summary(clustered) == "40 pairs in 2 clusters of 1 domain (left out: 16 pairs of small domains)"
    merged = packed(tmp_path / "c", pairs=run["pairs"], packing=random | {"batch_size": 40}, small_domains="merge")
    assert Counter(epoch_of(merged, 0)["domain"].to_pylist()) == {"(merged)": 80}


def test_a_polish_changes_every_epoch(run: dict[str, str], tmp_path: Path) -> None:
    found, plain = (packed(tmp_path / f"{n}", **all_of(run), packing={"polish_sweeps": n}) for n in (2, 0))
    for epoch, (shard, unpolished) in enumerate(zip(found.shards, plain.shards, strict=True)):
        check(found, run["pairs"], epoch)
        assert shard.files[0].sha256 != unpolished.files[0].sha256


def test_a_domain_may_have_many_clusters(run: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = packed(tmp_path / "few", clusters=run["pairs_clusters"])
    further = lambda domain: replace(domain, clusters=domain.clusters + 40_000)  # noqa: E731
    monkeypatch.setattr(module, "read_domain", lambda *given: further(read_domain(*given)))
    centroids = lambda *given: np.pad(read_centroids(*given), ((40_000, 0), (0, 0)))  # noqa: E731
    monkeypatch.setattr(module, "read_centroids", centroids)
    labels = list[NDArray[np.integer]]()
    noted = lambda *given, **named: labels.append(given[0]) or pack(*given, **named)  # noqa: E731
    monkeypatch.setattr(module, "pack", noted)
    many = epoch_of(packed(tmp_path / "many", clusters=run["pairs_clusters"]), 0)
    assert {each.dtype for each in labels} == {np.dtype(np.int32)}
    assert many["cluster"].to_pylist() == [cluster + 40_000 for cluster in epoch_of(few, 0)["cluster"].to_pylist()]


def test_epochs_in_turns(run: dict[str, str], tmp_path: Path) -> None:
    found = packed(tmp_path / "a", clusters=run["pairs_clusters"], packing={"shuffled": [1, 0]}, epochs=2)
    assert [shard.facts["shuffled"] for shard in found.shards] == [small.PAIRS // SIZE, 0]
    without = packed(tmp_path / "b", clusters=run["pairs_clusters"], epochs=2)
    assert found.shards[1].files[0].sha256 == without.shards[1].files[0].sha256
    for epoch in range(2):
        check(found, run["pairs"], epoch)


def test_regions_of_large_domains(run: dict[str, str], tmp_path: Path) -> None:
    inputs = all_of(run)
    settings = {"region_pairs": 10, "polish_sweeps": 1, "shuffled": [0, 0.5]}
    config = PackConfig.model_validate(inputs | {"packing": {"batch_size": SIZE, **settings}, "output": "x"})
    planned = Pack(config).plan()
    assert Counter(shard.name.rstrip("0123456789") for shard in planned) == {
        "placed": 1, "parts-00000-": 6, "parts-00001-": 6, "shares-00001-": 6, "epoch-": 2,
    }  # fmt: skip
    found = packed(tmp_path / "a", packing=settings, **inputs)
    for epoch, shard in enumerate(found.shards):
        table = check(found, run["pairs"], epoch)
        assert len(table) > small.PAIRS  # some fill up the last batches of regions and shares
        assert not found.manifest["dropped"]
        assert (epoch == 1) == (shard.facts["shuffled"] > 0)
    clusters = Artifact(run["pairs_clusters"], CLUSTERS)
    of_pair = {}
    for number in range(2):
        domain = read_domain(clusters, number)
        of_pair |= dict(zip(domain.pairs.tolist(), domain.clusters.tolist(), strict=True))
    assert [of_pair[pair] for pair in table["pair"].to_pylist()] == table["cluster"].to_pylist()
    folders = {name.split("/")[0] for name in Folder(found.uri).files() if "/" in name}
    assert folders == {"epoch=00000", "epoch=00001"}  # intermediate ones are removed
    random = packed(tmp_path / "b", packing={"region_pairs": 10, "order": "random"}, **inputs)
    check(random, run["pairs"], 1)


def test_what_regions_set_aside_is_dealt_across_all_of_them(tmp_path: Path) -> None:
    queries, documents = topics(400, 12, 40)
    inputs = store(tmp_path, queries=queries, documents=documents, domains=["one"] * 400)
    config = ClusterConfig(**inputs, cluster_size=5, smallest_domain=SIZE, output=str(tmp_path / "clusters"))
    clusters = small.make(Cluster(config))
    none, all_, half = (
        packed(tmp_path / str(share), clusters=clusters, packing={"region_pairs": 100, "shuffled": share}, epochs=2)
        for share in (0.0, 1.0, 0.5)
    )
    regions = [set(pq.read_table(none.path(file.name))["pair"].to_pylist()) for file in none.shards[0].files]
    assert len(regions) == 4
    for epoch in range(2):
        for found, files in ((all_, 4), (half, 8)):
            table, shard = check(found, inputs["pairs"], epoch), found.shards[epoch]
            assert len(shard.files) == files
            assert 400 < len(table) < 400 + files * SIZE
            dealt = [pq.read_table(found.path(file.name)) for file in shard.files if "dealt" in file.name]
            assert shard.facts["shuffled"] * SIZE == sum(map(len, dealt))
            for rows in dealt:
                shares = [len(region & set(rows["pair"].to_pylist())) / len(rows) for region in regions]
                assert min(shares) > 0.15
    few = packed(tmp_path / "few", clusters=clusters, packing={"region_pairs": 100, "shuffled": 0.02})
    assert 0 < few.shards[0].facts["shuffled"] < 4  # a batch of some regions: fewer shares than regions
    batches = check(few, inputs["pairs"])["pair"].to_numpy().reshape(-1, SIZE)
    assert all(len(set(batch)) == SIZE for batch in batches.tolist())
    assert all_.shards[0].facts["shuffled"] == len(epoch_of(all_, 0)) // SIZE
    assert epoch_of(all_, 0) != epoch_of(all_, 1)


def test_a_region_of_fewer_pairs_than_a_batch_joins_another(tmp_path: Path) -> None:
    """Else a batch would hold the same few pairs many times."""
    vectors = np.repeat(np.eye(8, dtype=np.float32), [2, 190, 2, 1, 2, 1, 1, 1], axis=0)
    inputs = store(tmp_path, queries=vectors, documents=vectors, domains=["one"] * 200)
    config = ClusterConfig(**inputs, cluster_size=25, smallest_domain=SIZE, output=str(tmp_path / "clusters"))
    clusters = small.make(Cluster(config))
    for order in ("tour", "random"):
        found = packed(tmp_path / order, clusters=clusters, packing={"region_pairs": 40, "order": order})
        batches = check(found, inputs["pairs"])["pair"].to_numpy().reshape(-1, SIZE)
        assert len(found.shards[0].files) < 5
        assert all(len(set(batch)) == SIZE for batch in batches.tolist())


def test_many_pairs_without_clusters_are_dealt_to_regions(tmp_path: Path) -> None:
    domains = [("large", "large", "a", "large", "b")[number % 5] for number in range(590)] + ["tiny"] * 3
    queries, documents = topics(len(domains), 12, 30)
    pairs = store(tmp_path, queries=queries, documents=documents, domains=domains, per_file=70)["pairs"]
    random: dict[str, Any] = {"pairs": pairs, "small_domains": "drop", "epochs": 2}
    whole = packed(tmp_path / "whole", packing={"order": "random"}, **random)
    found = packed(tmp_path / "regions", packing={"order": "random", "region_pairs": 120}, **random)
    assert found.manifest["dropped"]["pairs of small domains"] == 2 * 3
    for epoch in range(2):
        table = check(found, pairs, epoch)
        small, *regions = found.shards[epoch].files
        assert 590 < len(table) < 590 + (2 + len(regions)) * SIZE
        of_small = epoch_of(whole, epoch).filter(pc.not_equal(epoch_of(whole, epoch)["domain"], "large"))
        assert pq.read_table(found.path(small.name)) == of_small  # small data keep their bytes
        assert len(regions) == 3
        for region in regions:
            numbers = pq.read_table(found.path(region.name))["pair"].to_numpy()
            assert np.histogram(numbers, bins=6, range=(0, 590))[0].min() > 10  # from all files


def test_topics_are_clusters_of_queries(run: dict[str, str], tmp_path: Path) -> None:
    found = packed(tmp_path / "a", clusters=run["queries_clusters"], packing={"order": "topics"})
    clusters = check(found, run["pairs"])["cluster"].to_numpy().reshape(-1, SIZE)
    assert np.mean((clusters == clusters[:, :1]).all(axis=1)) > 0.2
    with pytest.raises(UserError, match="has clusters of pairs"):
        packed(tmp_path / "b", clusters=run["pairs_clusters"], packing={"order": "topics"})


@pytest.mark.parametrize(("names", "settings", "message"), [
    ([], {"packing": {"order": "random"}}, "nothing to pack"),
    (["pairs"], {}, "order is tour, .* no 'clusters'"),
    (["pairs"], {"packing": {"order": "random", "polish_sweeps": 1}}, "needs 'pairs' and 'vectors'"),
    (["pairs_clusters"], {"small_domains": "merge"}, "For clusters, set it in the 'cluster' job"),
])  # fmt: skip
def test_settings_that_do_not_go_together(run: dict[str, str], tmp_path, names, settings, message) -> None:
    inputs = {name.removeprefix("pairs_"): run[name] for name in names}
    with pytest.raises(ValidationError, match=message):
        packed(tmp_path, **inputs, **settings)
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(("name", "what"), [("pairs", "pairs"), ("vectors", "collection")])
def test_inputs_of_another_origin_are_refused(run: dict[str, str], tmp_path: Path, name: str, what: str) -> None:
    queries, documents = topics(small.PAIRS, 12, 10)
    others = store(tmp_path, queries=queries, documents=documents, domains=["plain"] * small.PAIRS)
    with pytest.raises(UserError, match=f"don't come from the same {what} "):
        packed(tmp_path / "packing", **all_of(run) | {name: others[name]})


def test_an_epoch_in_parts_is_what_one_task_makes(tmp_path, run, monkeypatch) -> None:
    inputs = all_of(run)
    whole = packed(tmp_path / "whole", packing={"polish_sweeps": 1}, **inputs)
    names = [(str(shard.facts["domain"]),) for shard in Artifact(run["pairs_clusters"]).shards]
    each = [Part(number, own) for number, own in enumerate(names)]
    monkeypatch.setattr("pipelines.jobs.pack.parts_of", lambda *_: each)
    settings = {"packing": PackingSettings(batch_size=SIZE, polish_sweeps=1), "output": str(tmp_path / "parts")}
    planned = Pack(PackConfig.model_validate(inputs | settings)).plan()
    domains = len(Artifact(run["pairs_clusters"]).shards)
    assert domains > 1
    assert [shard.name for shard in planned if shard.intermediate] == [
        "placed",
        *(f"parts-{epoch:05d}-{part:05d}" for epoch in range(2) for part in range(domains)),
    ]
    parts = packed(tmp_path / "parts", packing={"polish_sweeps": 1}, **inputs)
    for epoch, (of_whole, of_parts) in enumerate(zip(whole.shards, parts.shards, strict=True)):
        names = [f"epoch={epoch:05d}/part-{part:05d}.parquet" for part in range(domains)]
        assert [file.name for file in of_parts.files] == names
        assert replace(of_parts, files=()) == replace(of_whole, files=())  # all facts
    assert [epoch_of(parts, epoch) for epoch in range(2)] == [epoch_of(whole, epoch) for epoch in range(2)]
    assert not [name for name in Folder(parts.uri).files() if name.startswith("lookup/")]


def test_parts_have_domains_after_one_another() -> None:
    def bounds(pairs: list[int], regions: list[int]) -> list[tuple[int, ...]]:
        found = parts_of("abcdef"[: len(pairs)], pairs, regions, 10)
        for part in found:
            assert part.names == "abcdef"[part.first : part.first + len(part.names)]
            assert part.regions == regions[part.first]
        bounds = [(part.first, part.first + len(part.names)) for part in found]
        return [of if part.region is None else (*of, part.region) for of, part in zip(bounds, found, strict=True)]

    assert bounds([3, 4, 3, 10, 9], [1] * 5) == [(0, 3), (3, 4), (4, 5)]
    assert bounds([5], [1]) == [(0, 1)]
    assert bounds([5, 20, 3, 2], [1, 2, 1, 1]) == [(0, 1), (1, 2, 0), (1, 2, 1), (2, 4)]
    assert bounds([20, 3], [2, 1]) == [(0, 1, 0), (0, 1, 1), (1, 2)]
    assert bounds([], []) == []


@pytest.mark.parametrize("source", ["pairs_clusters", "pairs"])
def test_the_seed_decides_which_pairs_meet_and_share_a_region(run: dict[str, str], tmp_path: Path, source: str) -> None:
    """Along a tour and at random: the same seed gives the same batches, another one others."""
    inputs = {"clusters": run[source]} if source != "pairs" else {"pairs": run[source], "packing": {"order": "random"}}
    one, again, other = (packed(tmp_path / f"{n}", **inputs, seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert epoch_of(one, 0).equals(epoch_of(again, 0))
    assert not epoch_of(one, 0)["pair"].equals(epoch_of(other, 0)["pair"])
    inputs["packing"] = {"order": "random", "region_pairs": 10}
    regions, others = (
        {
            pair: number
            for number, file in enumerate(found.shards[0].files)
            for pair in pq.read_table(found.path(file.name))["pair"].to_pylist()
        }
        for found in (packed(tmp_path / f"regions-{seed}", **inputs, seed=seed) for seed in range(2))
    )
    assert any(regions[pair] != others[pair] for pair in regions.keys() & others.keys())
