"""What the report says of the collection, its pairs, the clusters, and of what was left out."""

from pathlib import Path

import pytest

from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.pairs.duplicates import DuplicateSettings
from pipelines.reports.batches import clusters_section
from pipelines.reports.data import data_section, left_out_section
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Section
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.jobs.made_up import collection_of
from tests.unit.small_run import ODD_DOMAIN, PAIRS, make, make_run


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
    assert counts["training pairs"] == "48"
    assert counts["domains of the pairs"] == "2"
    assert counts["pairs of the largest domain, 'plain'"] == "32 (66.7%)"
    assert data_section(None, None) is None


def test_what_was_left_out_is_listed_by_stage(run: dict[str, str]) -> None:
    collection, pairs, vectors = (Artifact(run[name]) for name in ("collection", "pairs", "vectors"))
    assert left_out_section([collection, pairs]) is None
    pairs.manifest["dropped"] = {"some_reason": 3, "never": 0}
    section = left_out_section([collection, vectors, pairs])
    assert section is not None
    assert tables(section)[0].rows == [["pairs", "some reason", "3"]]


def test_repeated_pairs_are_counted(tmp_path: Path) -> None:
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
    assert counts["pairs: pairs with both texts of an earlier one"] == "1"
    assert counts["pairs: pairs with nearly both texts of an earlier one"] == "1"
    for name, settings in (("exact", {}), ("kept", {"exact": "keep"})):
        section = data_section(None, pairs(name, **settings))
        assert section is not None
        looked = [row[0] for row in tables(section)[0].rows if "earlier one" in str(row[0])]
        assert looked == (["pairs: pairs with both texts of an earlier one"] if name == "exact" else [])


def test_clusters_section_has_every_cluster(run: dict[str, str]) -> None:
    clusters = Artifact(run["clusters"])
    (domains,) = tables(clusters_section(clusters))
    assert [row[0] for row in domains.rows] == ["plain", ODD_DOMAIN]
    assert sum(int(str(row[1])) for row in domains.rows) == PAIRS
    assert sum(int(str(row[2])) for row in domains.rows) == -(-32 // 5) + -(-16 // 5)
    assert sum(int(str(row[3])) for row in domains.rows) == clusters.manifest["counts"]["clusters"]
