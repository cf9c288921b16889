"""Real collections: exported and read back, nothing is lost."""

import os
from pathlib import Path

import pytest

from pipelines.formats import beir
from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.formats.mteb import MtebFolder
from pipelines.jobs.collect import Collect, CollectConfig
from retrieval.collections.collection import StoredCollection
from tests.unit.retrieval.collections.contents import contents
from tests.unit.small_run import make


@pytest.fixture
def data() -> Path:
    folder = os.environ.get("RAYTRIEVER_TEST_DATA")
    if not folder:
        pytest.skip("RAYTRIEVER_TEST_DATA does not name a folder of BEIR collections")
    return Path(folder)


@pytest.mark.parametrize(("name", "grades"), [("squad_dpr", {1}), ("cystic_fibrosis", {1, 2, 3}), ("cosqa", {0, 1})])
def test_what_is_exported_reads_back_equal(data: Path, tmp_path: Path, name: str, grades: set[int]) -> None:
    source = BeirFolder(path=str(data / name))
    before = contents(source.open())
    collection = StoredCollection(make(Collect(CollectConfig(source=source, output=str(tmp_path / "stored")))))
    assert {row[2] for row in before.judgments} == grades
    (tmp_path / "beir").mkdir()
    beir.write(collection, tmp_path / "beir")
    assert contents(BeirFolder(path=str(tmp_path / "beir")).open()) == before


def test_a_beir_folder_reads_by_its_columns_and_as_mteb(data: Path) -> None:
    path = str(data / "squad_dpr")
    by_columns = ColumnFiles.model_validate(
        {
            "path": path,
            "documents": {"table": "corpus.jsonl", "id": "_id", "title": "title"},
            "queries": {"table": "queries.jsonl", "id": "_id", "answers": "metadata.answers"},
            "judgments": {
                "splits": {split: f"qrels/{split}.tsv" for split in ("train", "dev", "test")},
                "query_id": "query-id",
                "document_id": "corpus-id",
                "relevance": "score",
            },
        }
    )
    expected = contents(BeirFolder(path=path).open())
    assert contents(by_columns.open()) == expected
    found = contents(MtebFolder(path=path).open())
    assert (found.documents, found.judgments) == (expected.documents, expected.judgments)
