"""The recipe `retrieval` on real collections, whose means trec_eval checks; hard negatives of real questions."""

import json
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.mine import Mine, MineConfig
from pipelines.mining.candidates import StoredCandidates, mined_negatives
from raytriever.artifacts.artifact import Artifact
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.judging import collection_judgments
from retrieval.indexes.exact_search import search_stored
from retrieval.lexical import BM25Settings
from retrieval.rankings import StoredRanking, read_ranking_file
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.jobs.test_mine import make_run
from tests.unit.retrieval.evaluation.test_answers import literal_has_answer
from tests.unit.retrieval.indexes.rankings import assert_same
from tests.unit.retrieval.real_data import real_data
from tests.unit.retrieval.test_lexical import index_whole
from tests.unit.small_run import make

pytest.importorskip("faiss", reason="FAISS is not installed")

RUNS = {
    "BM25": "bm25_run",
    "dense exact": "exact_run",
    "dense IVF-PQ": "ivf_pq_run",
    "dense HNSW-PQ re-ranked": "hnsw_pq_run",
    "BM25 + dense fused": "fused_run",
    "BM25 re-ranked": "reranked_run",
}
COLLECTIONS = ["cystic_fibrosis", pytest.param("cacm", marks=pytest.mark.slow)]  # grades 1 to 3; without texts


@pytest.fixture(scope="module", params=COLLECTIONS)
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """The folder in which the recipe has run over a collection, with a tiny encoder and small codes."""
    folder = tmp_path_factory.mktemp("retrieval")
    settings = {
        "vectors.encoder.model": str(tiny_encoder),
        "vectors.encoder.pooling": "mean",
        "vectors.encoder.normalize": "true",
        "vectors.encoder.max_length": "32",
        "vectors.encoder.dtype": "float32",
        "ivf_pq_index.index.factory": "IVF16,PQ8x4",
        "hnsw_pq_index.index.factory": "HNSW32_PQ16x6",
        "corpus.source.path": str(real_data(request.param)),
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    for stage in recipe_stages(load_recipe("retrieval", overrides, str(folder))).values():
        make(stage)
    return folder


def test_means_are_those_of_trec_eval(output: Path) -> None:
    qrels = collection_judgments(str(output / "corpus"), "test", ["AP"]).qrels
    means = Artifact(str(output / "evaluation")).read_json("metrics.json")["means"]
    names = {"nDCG@10": "ndcg_cut_10", "AP@100": "map_cut_100", "R@100": "recall_100"}
    judge = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.100", "recall.100"})
    for system, folder in RUNS.items():
        run = read_ranking_file(StoredRanking(str(output / folder)).path("run.trec"))
        values = judge.evaluate(run)
        for ours, theirs in names.items():
            # trec_eval -c: a judged query that the run lacks counts 0
            mean = sum(found[theirs] for found in values.values()) / len(qrels)
            assert means[system][ours] == pytest.approx(mean, abs=1e-6), (system, ours)


def test_shards_and_codes_with_re_ranking_find_what_one_exact_search_finds(output: Path) -> None:
    collection, vectors = StoredCollection(str(output / "corpus")), StoredVectors(str(output / "vectors"))
    exact, coded = StoredRanking(str(output / "exact_run")), StoredRanking(str(output / "hnsw_pq_run"))
    queries = vectors.part("queries").gather(collection.require("queries", exact.query_ids()))
    documents = vectors.part("documents")
    expected = search_stored(queries, documents.range(0, len(documents)), 200)
    assert_same(exact.ranking(), expected)
    pairs = zip(expected.rows[:, :10].tolist(), coded.ranking().rows[:, :10].tolist(), strict=True)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in pairs]) > 0.9


def test_every_run_says_what_made_it(output: Path) -> None:
    systems = {name: StoredRanking(str(output / folder)).system for name, folder in RUNS.items()}
    assert systems["BM25"]["k1"] == 0.9
    assert systems["dense IVF-PQ"]["search_parameters"] == "nprobe=8"
    assert systems["BM25 re-ranked"]["reranked"] == 100
    assert all(system["with_title"] is True for system in systems.values())
    assert Artifact(str(output / "evaluation")).manifest["facts"]["systems"]["BM25"]["index"] == "BM25"


def test_negatives_of_real_questions(tmp_path: Path) -> None:
    folder = real_data("squad_dpr")
    uri = make(Collect(CollectConfig(source=BeirFolder(path=str(folder)), output=str(tmp_path / "collection"))))
    collection = StoredCollection(uri)
    documents = collection.rows_of("documents").read(["id", "title", "text"]).to_pylist()
    texts = {found["id"]: f"{found['title']} {found['text']}" for found in documents}
    judged = set(collection.judgments("dev")["query_id"].to_pylist())
    asked = collection.rows_of("queries").read(["id", "text"]).to_pylist()
    queries = [row for row in asked if row["id"] in judged]
    query_ids = [query["id"] for query in queries]
    index = index_whole(texts.values(), BM25Settings())
    ranking = index.search([query["text"] for query in queries], 40)
    named = [{"_id": found["id"]} for found in documents]
    run = make_run(tmp_path / "run", uri, query_ids, named, ranking.rows, ranking.scores)
    config = MineConfig(run=run, collection=uri, split="dev", number=8, output=str(tmp_path / "mined"))
    mined: dict[str, list[str]] = {}
    for query_rows, document_rows in mined_negatives(StoredCandidates(make(Mine(config)))):
        for query, document in zip(query_rows.tolist(), document_rows.tolist(), strict=True):
            mined.setdefault(asked[query]["id"], []).append(documents[document]["id"])
    assert list(mined) == query_ids
    same = total = 0
    for line in (folder / "dpr_ids/dev.jsonl").read_text(encoding="utf-8").splitlines():
        example = json.loads(line)
        found = mined[example["query_id"]]
        assert not set(found) & set(example["positive_ids"])
        assert not any(literal_has_answer(texts[document], example["answers"]) for document in found)
        same += len(set(found) & set(example["hard_negative_ids"]))
        total += len(example["hard_negative_ids"])
    assert same / total > 0.9
