"""What the report says of the collection, its pairs, the clusters, and of what was left out."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.pairs.duplicates import DuplicateSettings
from pipelines.reports.clusters import clusters_section
from pipelines.reports.data import data_section, left_out_section
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Details, Plot, Section
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.jobs.made_up import collection_of
from tests.unit.small_run import BATCH_SIZE, ODD_DOMAIN, PAIRS, make, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_run(tmp_path_factory.mktemp("report") / "run")


def tables(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def test_data_section_counts_splits_and_domains(run: dict[str, str]) -> None:
    collection, pairs = StoredCollection(run["collection"]), Artifact(run["pairs"])
    section = data_section(collection, pairs)
    assert section is not None
    counts = {str(row[0]): str(row[1]) for row in tables(section)[0].rows}
    assert counts["documents"] == "54"
    assert counts["judgments of split 'train'"] == "48"
    assert counts["judgments of split 'test'"] == "6"
    assert counts["pairs per domain: median, largest"] == "24, 32"
    assert counts["training pairs of split 'train'"] == "48"
    assert counts["domains of the pairs"] == "2"
    assert counts["share of the largest domain, 'plain'"] == "66.7%"
    assert data_section(None, None) is None


def test_what_was_left_out_is_listed_by_stage(run: dict[str, str]) -> None:
    collection, pairs, vectors = (Artifact(run[name]) for name in ("collection", "pairs", "vectors"))
    section = left_out_section([collection, pairs])
    assert section is not None
    assert tables(section)[0].rows == [["documents", "nothing", "0"], ["pairs", "nothing", "0"]]
    pairs.manifest["dropped"] = {"some_reason": 3, "never": 0}
    section = left_out_section([collection, vectors, pairs])
    assert section is not None
    assert tables(section)[0].rows == [["documents", "nothing", "0"], ["pairs", "some reason", "3"]]
    assert left_out_section([vectors]) is None


def test_repeated_pairs_are_counted_and_shown(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    documents = [("", words), ("", words.upper()), ("", words + " more"), ("", "quite another text")]
    queries = ["what is it", "What  is it", "what is it", "something else"]
    stored = collection_of(tmp_path, queries, documents, [(0, 0), (1, 1), (2, 2), (3, 3)])

    def pairs(name: str, **settings: str) -> Artifact:
        duplicates = DuplicateSettings(**settings)
        return Artifact(make(Pairs(PairsConfig(collection=stored, duplicates=duplicates, output=str(tmp_path / name)))))

    found = pairs("reported", near="report")
    section = data_section(StoredCollection(stored), found)
    assert section is not None
    counts = dict(tables(section)[0].rows)
    assert counts["pairs with both texts of an earlier one"] == "1, dropped"
    assert counts["pairs with nearly both texts of an earlier one"] == "1, kept"
    examples = {block.summary: block.content for block in section.blocks if isinstance(block, Details)}
    assert list(examples) == ["Examples: pairs", "Examples: pairs with the same texts", "Examples: nearly equal pairs"]
    exact, near = (examples[f"Examples: {name}"] for name in ("pairs with the same texts", "nearly equal pairs"))
    assert isinstance(exact, Table)
    assert isinstance(near, Table)
    assert [row[1:4:2] for row in exact.rows] == [["q0", "d0"], ["q1", "d1"]]
    assert [row[2] for row in exact.rows] == ["what is it", "What is it"]
    assert [row[1:4:2] for row in near.rows] == [["q0", "d0"], ["q2", "d2"]]
    for name, settings in (("exact", {}), ("kept", {"exact": "keep"})):
        section = data_section(None, pairs(name, **settings))
        assert section is not None
        looked = [row[0] for row in tables(section)[0].rows if "earlier one" in str(row[0])]
        assert looked == (["pairs with both texts of an earlier one"] if name == "exact" else [])


def test_clusters_section_has_every_cluster(run: dict[str, str]) -> None:
    clusters = Artifact(run["clusters"])
    sizes = []
    for shard in clusters.shards:
        assigned = pq.read_table(clusters.path(shard.files[0].name))["cluster"].to_numpy()
        sizes += [int((assigned == number).sum()) for number in range(shard.counts["clusters"])]
    section = clusters_section(clusters, BATCH_SIZE)
    quantities, table = tables(section)
    asked_for = -(-32 // 5) + -(-16 // 5)
    assert dict(quantities.rows) == {
        "pairs": f"{PAIRS}",
        "domains": "2",
        "clusters asked for": f"{asked_for}",
        "clusters used": f"{len(sizes)}",
        "clusters that ran empty on the way and were given a far-off pair": "0",
        "pairs of a cluster: smallest, median, largest": f"{min(sizes)}, {np.median(sizes):.0f}, {max(sizes)}",
        f"clusters of more pairs than a batch of {BATCH_SIZE}": f"{np.mean([n > BATCH_SIZE for n in sizes]):.0%}",
    }
    assert [row[0] for row in table.rows] == ["plain", ODD_DOMAIN]
    assert sum(int(str(row[3])) for row in table.rows) == len(sizes)
    assert sum(int(str(row[2])) for row in table.rows) == asked_for
    curve = [block for block in section.blocks if isinstance(block, Plot)][1]
    assert "2 largest" not in curve.caption
    assert "of all domains" in curve.caption
