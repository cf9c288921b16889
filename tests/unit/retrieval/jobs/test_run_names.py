"""Ids and tags that a run file can't hold are refused before work is spent on them, not when the run is written."""

from pathlib import Path

import numpy as np
import pytest

from raytriever.errors import UserError
from retrieval.jobs import index as index_job
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from tests.unit.retrieval.made_up import beir_collection, stored_vectors
from tests.unit.small_run import make

pytest.importorskip("faiss", reason="FAISS is not installed")


def collected(
    folder: Path, documents: list[str], queries: list[str], judged: list[str], output: str | None = None
) -> str:
    """A collection in which the first document is what each of the ``judged`` queries looks for."""
    texts, asked = [(id_, "", "alpha beta") for id_ in documents], [(id_, "alpha beta") for id_ in queries]
    return beir_collection(folder, texts, asked, [(query, documents[0]) for query in judged], output)


def test_documents_that_no_run_can_name_are_refused_before_they_are_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr(index_job, "_IDS_AT_ONCE", 2)
    documents = ["a", "b", "c", "my file.py", "d"]
    collection = collected(tmp_path, documents, ["q"], ["q"])
    vectors = stored_vectors(
        tmp_path / "vectors", collection, {"documents": (np.ones((5, 2), dtype=np.float16), documents)}
    )
    for settings in (LexicalIndexSettings(collection=collection), VectorIndexSettings(vectors=vectors)):
        with pytest.raises(UserError, match=r"A document id is 'my file\.py', which can't be written"):
            Index(IndexConfig(index=settings, output=str(tmp_path / "index"))).check_inputs({"index"})


def test_documents_in_an_object_store_are_looked_at_there(tmp_path, object_store, monkeypatch):
    monkeypatch.setenv("RAYTRIEVER_CACHE", str(tmp_path / "cache"))
    collection = collected(tmp_path, ["a", "b c"], ["q"], ["q"], f"{object_store}/documents")
    index = Index(IndexConfig(index=LexicalIndexSettings(collection=collection), output=str(tmp_path / "index")))
    with pytest.raises(UserError, match="A document id is 'b c', which can't be written"):
        index.check_inputs({"index"})
    assert not list(tmp_path.glob("cache/**/*"))  # no text was copied for it


def test_queries_that_no_run_can_name_are_refused_where_they_are_searched(tmp_path: Path) -> None:
    collection = collected(tmp_path, ["a", "b"], ["q1", "q\u20032", "q3"], ["q1", "q3"])
    lexical = make(Index(IndexConfig(index=LexicalIndexSettings(collection=collection), output=str(tmp_path / "ix"))))

    def search(split: str | None) -> Search:
        return Search(SearchConfig(index=lexical, collection=collection, split=split, output=str(tmp_path / "run")))

    with pytest.raises(UserError, match=r"A query id is 'q\\u20032', which can't be written"):
        search(None).check_inputs({"collection"})
    assert StoredRanking(make(search("test"))).query_ids() == ["q1", "q3"]  # of the others nothing is written
