"""Ids and tags that a run file can't hold are refused before work is spent on them, not when the run is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.jobs import index as index_job
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from tests.unit.small_run import make, make_artifact

pytest.importorskip("faiss", reason="FAISS is not installed")

CONTRACT = {
    "model": "m" * 16, "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
    "max_length": 16, "dtype": "float32", "dimension": 2,
}  # fmt: skip


def collected(
    folder: Path, documents: list[str], queries: list[str], judged: list[str], output: str | None = None
) -> str:
    """A collection in which the first document is what each of the ``judged`` queries looks for."""
    (folder / "qrels").mkdir(parents=True)
    for name, ids in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": id_, "title": "", "text": "alpha beta"}) + "\n" for id_ in ids)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    rows = "".join(f"{query}\t{documents[0]}\t1\n" for query in judged)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    source = BeirFolder(path=str(folder))
    return make(Collect(CollectConfig(source=source, output=output or str(folder / "collection"))))


def embedded(folder: Path, collection: str, documents: list[str], queries: list[str]) -> str:
    files: dict[str, Any] = {}
    for part, ids in (("documents", documents), ("queries", queries)):
        files[f"{part}/00000.npy"] = np.ones((len(ids), 2), dtype=np.float16)
        files[f"{part}/00000.ids.parquet"] = pa.table({"id": ids})
    inputs = {"collection": StoredCollection(collection).fingerprint}
    return make_artifact(folder, "vectors", inputs, {"encoder": CONTRACT}, files, len(documents) + len(queries))


def indexes(folder: Path, collection: str, vectors: str) -> list[Index]:
    settings = LexicalIndexSettings(collection=collection), VectorIndexSettings(vectors=vectors)
    return [Index(IndexConfig(index=each, output=str(folder / f"of_{each.kind}"))) for each in settings]


def test_documents_that_no_run_can_name_are_refused_before_they_are_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr(index_job, "_IDS_AT_ONCE", 2)
    documents, queries = ["a", "b", "c", "my file.py", "d"], ["q"]
    collection = collected(tmp_path, documents, queries, queries)
    vectors = embedded(tmp_path / "vectors", collection, documents, queries)
    for index in indexes(tmp_path, collection, vectors):
        with pytest.raises(UserError, match=r"A document id is 'my file\.py', which can't be written"):
            index.check_inputs({"index"})


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
