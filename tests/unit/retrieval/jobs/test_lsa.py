"""`raytriever lsa` without Ray: vectors that clustering, searching and filtering take, the same whatever the cut."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.batches import BatchReader
from pipelines.formats.beir import BeirFolder
from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.jobs import stage_class
from retrieval.jobs import lsa
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.lsa import Lsa, LsaConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.lexical import BM25Settings
from retrieval.rankings import StoredRun
from retrieval.vectors import StoredVectors
from tests.unit.retrieval.collections.contents import Contents
from tests.unit.retrieval.exports.made_collections import stored
from tests.unit.small_run import make

TOPICS = [
    ["river", "water", "spring", "sea", "shore"],
    ["index", "page", "word", "book", "print"],
    ["table", "key", "value", "function", "return"],
    ["wing", "air", "flow", "lift", "drag"],
]
DOCUMENTS, QUERIES = 96, 24


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Document n is on topic n mod 4; query n asks for it with words of its topic; one of each has no known word."""
    folder = tmp_path_factory.mktemp("collection")
    rng = np.random.default_rng(0)

    def text(number: int, words: int) -> str:
        return " ".join(rng.choice(TOPICS[number % 4], words))

    documents = [{"_id": f"d{n}", "title": "", "text": text(n, 12)} for n in range(DOCUMENTS)]
    queries = [{"_id": f"q{n}", "text": text(n, 3)} for n in range(QUERIES)]
    documents[5]["text"], queries[7]["text"] = "zzz", "?"
    source = folder / "source"
    (source / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", documents), ("queries", queries)):
        (source / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    qrels = "".join(f"q{n}\td{n}\t1\n" for n in range(QUERIES))
    (source / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{qrels}")
    return make(Collect(CollectConfig(source=BeirFolder(path=str(source)), output=str(folder / "stored"))))


def vectors(collection: str, output: Path, **settings: Any) -> str:
    values = {"dimension": 8, "bm25": BM25Settings(stemmer=None), **settings}
    return make(Lsa(LsaConfig(collection=collection, output=str(output), **values)))


def files(folder: str) -> dict[str, bytes]:
    found = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "run.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("weights", ["tfidf", "bm25"])
def test_texts_of_a_topic_are_near_one_another(collection: str, tmp_path: Path, weights: str) -> None:
    made = StoredVectors(vectors(collection, tmp_path / "v", weights=weights, dimension=4))
    documents, queries = (made.part(part).range(0, n) for part, n in (("documents", 96), ("queries", 24)))
    assert documents.shape == (DOCUMENTS, 4)
    assert [str(name) for name in made.part("queries").ids(3, 5)] == ["q3", "q4"]
    kept = np.delete(np.arange(QUERIES), 7)
    similar = queries[kept] @ documents.T
    same = kept[:, None] % 4 == np.arange(DOCUMENTS) % 4
    same[:, 5] = False
    assert similar[same].min() > 0.99
    assert similar[~same].max() < 0.01


def test_texts_without_terms_are_zero_counted_and_named(collection: str, tmp_path: Path) -> None:
    made = StoredVectors(vectors(collection, tmp_path / "v"))
    lengths = np.linalg.norm(made.part("documents").range(0, DOCUMENTS), axis=1)
    np.testing.assert_allclose(lengths, np.arange(DOCUMENTS) != 5, atol=2e-3)
    assert not made.part("queries").range(7, 8).any()
    counts = made.manifest["counts"]
    assert (counts["documents without terms"], counts["queries without terms"]) == (1, 1)
    summary = Lsa(LsaConfig(collection=collection, output=made.uri)).summary(Artifact(made.uri))
    assert "120 texts, 8 dimensions of 20 terms" in summary
    assert "2 texts without a term have zero vectors (d5, q7, …)" in summary


def test_bytes_do_not_depend_on_how_the_work_is_cut(
    collection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = vectors(collection, tmp_path / "whole", texts_per_shard=40)
    again = vectors(collection, tmp_path / "again", texts_per_shard=40)
    assert files(whole) == files(again)
    assert not [name for name in files(whole) if name.startswith(("fit/", "counts/"))]
    monkeypatch.setattr(lsa, "_COUNTED_IN_A_SHARD", 7)
    monkeypatch.setattr(lsa, "_TEXTS_AT_ONCE", 5)
    cut = vectors(collection, tmp_path / "cut", texts_per_shard=40)
    assert files(cut) == files(whole)
    other = vectors(collection, tmp_path / "other", texts_per_shard=40, seed=1, sample=60)
    assert StoredVectors(other).contract.model != StoredVectors(whole).contract.model


def test_a_worker_is_sent_no_more_than_the_settings(collection: str, tmp_path: Path) -> None:
    stage = Lsa(LsaConfig(collection=collection, output=str(tmp_path / "v"), dimension=8))
    make(stage)
    assert stage._fit is not None
    assert stage.__reduce__() == (Lsa, (stage.config,))


def test_clustering_packing_filtering_and_searching_take_them(collection: str, tmp_path: Path) -> None:
    made = vectors(collection, tmp_path / "v", dtype="float32")
    assert np.load(Path(made) / "documents" / "00000.npy").dtype == np.float32
    pairs = make(Pairs(PairsConfig(collection=collection, split="train", output=str(tmp_path / "pairs"))))
    clustered = ClusterConfig(
        pairs=pairs, vectors=made, cluster_size=6, smallest_domain=6, output=str(tmp_path / "clusters")
    )
    clusters = make(Cluster(clustered))
    packed = PackConfig(clusters=clusters, packing=PackingSettings(batch_size=6), output=str(tmp_path / "packing"))
    inputs = {"pairs": pairs, "collection": collection, "vectors": made, "packing": make(Pack(packed))}
    batches = BatchReader(make(Filter(FilterConfig(**inputs, output=str(tmp_path / "batches")))))
    assert batches.number_of_batches(0) == QUERIES // 6
    index = make(Index(IndexConfig(index=VectorIndexSettings(vectors=made), output=str(tmp_path / "index"))))
    searched = {"index": index, "collection": collection, "split": "train"}
    run = StoredRun(make(Search(SearchConfig(**searched, vectors=made, output=str(tmp_path / "run")))))
    first = run.ranking().rows[:, 0]
    topics = np.delete(first % 4 == np.arange(QUERIES) % 4, 7)
    assert topics.all()
    other = vectors(collection, tmp_path / "other", seed=1, sample=50)
    with pytest.raises(UserError, match="come from different encoders: model"):
        make(Search(SearchConfig(**searched, vectors=other, output=str(tmp_path / "no"))))


def test_what_can_not_be_analysed_is_named(collection: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dimension is 256, but there are 120 texts and 20 terms to learn from"):
        vectors(collection, tmp_path / "a", dimension=256)
    with pytest.raises(UserError, match=r"has no term in 90 documents or more\. Lower min_df"):
        vectors(collection, tmp_path / "b", min_df=90)
    with pytest.raises(UserError, match="dimension is 8, but there are 120 texts and 3 terms"):
        vectors(collection, tmp_path / "c", max_features=3)
    alone = stored(tmp_path, Contents([("d", "", "alone", "")], [], []))
    with pytest.raises(UserError, match="has 1 documents and 0 queries: of queries no vectors can be made"):
        vectors(alone.uri, tmp_path / "d", parts=("queries",))


@pytest.mark.skipif(
    "RAYTRIEVER_TEST_DATA" not in os.environ,
    reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections",
)
def test_latent_semantics_find_what_was_judged_relevant(tmp_path: Path) -> None:
    """Cranfield, nDCG@10: 0.5317 when this was written; BM25 has 0.4911 there."""
    source = BeirFolder(path=str(Path(os.environ["RAYTRIEVER_TEST_DATA"]) / "cranfield"))
    collected = make(Collect(CollectConfig(source=source, output=str(tmp_path / "c"))))
    made = make(Lsa(LsaConfig(collection=collected, output=str(tmp_path / "v"))))
    index = make(Index(IndexConfig(index=VectorIndexSettings(vectors=made), output=str(tmp_path / "index"))))
    searched = SearchConfig(index=index, collection=collected, split="test", vectors=made, output=str(tmp_path / "r"))
    judged = EvaluateConfig(
        collection=collected, runs={"lsa": make(Search(searched))}, split="test", output=str(tmp_path / "e")
    )
    found = json.loads((Path(make(Evaluate(judged))) / "metrics.json").read_text())
    assert 0.52 < found["means"]["lsa"]["nDCG@10"] < 0.54


def test_the_command_has_it() -> None:
    assert stage_class("lsa", "here") is Lsa
