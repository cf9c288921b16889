"""Index, search, rerank and fuse as stages: the same run however the work is cut, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipelines.jobs.mine import Mine, MineConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.indexes import vector_index
from retrieval.indexes.exact_search import search_stored
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.fuse import Fuse, FuseConfig
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings, id_blocks
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking, read_ranking_file
from tests.unit.pipelines.jobs.test_group import collection_of
from tests.unit.retrieval.indexes.rankings import assert_same
from tests.unit.retrieval.made_up import CONTRACT, beir_collection, stored_vectors
from tests.unit.small_run import make, make_artifact

pytest.importorskip("faiss", reason="FAISS is not installed")

DOCUMENTS, QUERIES, DIMENSION = 90, 21, 8
WORDS = ["wing", "lift", "drag", "flow", "shock", "heat", "plate", "cone", "jet", "wave"]
OTHER_QUERIES = "answers the queries of another collection"
NOWHERE = [("other", "", "no matter")]  # documents of a collection of which the queries alone are used


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    documents = [(f"d{row}", f"t{row}", f"{WORDS[row % 10]} {WORDS[row // 10]}") for row in range(DOCUMENTS)]
    queries = [(f"q{row}", f"{WORDS[row % 10]} of t{row}") for row in range(QUERIES)]
    judged = [(f"q{row}", f"d{row}") for row in range(QUERIES) if row != 3]
    return beir_collection(tmp_path_factory.mktemp("beir"), documents, queries, judged)


def make_vectors(folder: Path, collection: str, shape: tuple[int, ...] = (), **contract: Any) -> str:
    generator = np.random.default_rng(1)
    parts = {}
    for part, count, inner in (("documents", DOCUMENTS, shape), ("queries", QUERIES, ())):
        vectors = generator.standard_normal((count, *inner, DIMENSION)).astype(np.float16)
        parts[part] = (vectors, [f"{part[0]}{row}" for row in range(count)])
    return stored_vectors(folder, collection, parts, files=4, **{"query_prompt": "query: "} | contract)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, collection: str) -> str:
    return make_vectors(tmp_path_factory.mktemp("vectors"), collection)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, vectors: str) -> str:
    """Of all the vectors, in one shard."""
    return make_index(tmp_path_factory.mktemp("index"), vectors)


@pytest.fixture(scope="module")
def bm25(tmp_path_factory: pytest.TempPathFactory, collection: str) -> str:
    return make_bm25(tmp_path_factory.mktemp("bm25"), collection)


def values(vectors: str, part: str) -> NDArray[Any]:
    artifact = Artifact(vectors)
    return np.concatenate([np.load(artifact.path(name)) for name in artifact.names(f"{part}/", ".npy")])


def make_index(folder: Path, vectors: str, **settings: Any) -> str:
    index = VectorIndexSettings(vectors=vectors, **settings)
    return make(Index(IndexConfig(index=index, output=str(folder / "index"))))


def make_bm25(folder: Path, collection: str, **settings: Any) -> str:
    index = LexicalIndexSettings(collection=collection, **settings)
    return make(Index(IndexConfig(index=index, output=str(folder / "bm25"))))


def search(folder: Path, **settings: Any) -> StoredRanking:
    return StoredRanking(make(Search(SearchConfig(output=str(folder / "run"), **settings))))


def rerank(folder: Path, run: StoredRanking, vectors: str, collection: str, **settings: Any) -> StoredRanking:
    config = RerankConfig(run=run.uri, vectors=vectors, collection=collection, output=str(folder / "anew"), **settings)
    return StoredRanking(make(Rerank(config)))


def fuse(folder: Path, runs: dict[str, str], **settings: Any) -> StoredRanking:
    return StoredRanking(make(Fuse(FuseConfig(runs=runs, output=str(folder / "fused"), **settings))))


@pytest.mark.parametrize(("shards", "queries_per_shard"), [(1, 100), (2, 7), (5, 1)])
def test_the_run_does_not_depend_on_how_the_work_is_cut(tmp_path, collection, vectors, shards, queries_per_shard):
    index = make_index(tmp_path, vectors, shards=shards)
    searched = {"index": index, "collection": collection, "vectors": vectors, "split": None, "top_k": 30}
    run = search(tmp_path, **searched, queries_per_shard=queries_per_shard)
    exact = search_stored(values(vectors, "queries"), values(vectors, "documents").astype(np.float32), 30)
    assert_same(run.ranking(), exact)
    assert run.query_ids() == [f"q{row}" for row in range(QUERIES)]
    assert pa.concat_arrays(id_blocks(Artifact(index))).to_pylist() == [f"d{row}" for row in range(DOCUMENTS)]
    lines = read_ranking_file(run.path("run.trec"))
    assert list(lines["q5"]) == [f"d{row}" for row in exact.rows[5]]
    said = {"index": "Flat", "query_prompt": "query: ", "with_title": True, "model": None}
    assert {name: run.system.get(name) for name in said} == said


def test_a_split_names_the_queries_it_judges(tmp_path: Path, collection: str, vectors: str, index: str) -> None:
    searched = {"index": index, "collection": collection, "vectors": vectors}
    assert search(tmp_path, **searched).query_ids() == [f"q{row}" for row in range(QUERIES) if row != 3]
    with pytest.raises(UserError, match="no judgments of split 'dev'"):
        search(tmp_path / "x", **searched, split="dev")


def test_documents_of_several_vectors(tmp_path: Path, collection: str) -> None:
    vectors = make_vectors(tmp_path / "vectors", collection, (3,))
    index = make_index(tmp_path, vectors, shards=4)
    run = search(tmp_path, index=index, collection=collection, vectors=vectors, split=None, top_k=DOCUMENTS)
    queries, documents = (values(vectors, part).astype(np.float32) for part in ("queries", "documents"))
    scores = np.einsum("qd,nmd->qnm", queries, documents).max(axis=2)
    np.testing.assert_array_equal(run.ranking().rows, np.argsort(-scores, axis=1, kind="stable"))
    anew = rerank(tmp_path, run, vectors, collection, depth=20)
    np.testing.assert_array_equal(anew.ranking().rows, run.ranking().rows[:, :20])


def test_the_memory_budget_sets_the_shards(tmp_path: Path, vectors: str) -> None:
    assert len(Artifact(make_index(tmp_path, vectors, memory_budget="64MiB")).shards) == 1
    reading = 2 * 4 * 16_384 * DIMENSION
    cut = Artifact(make_index(tmp_path / "small", vectors, memory_budget=reading + 3 * 4 * DIMENSION * 45))
    assert [shard.rows for shard in cut.shards] == [45, 45]
    with pytest.raises(UserError, match=r"index\.memory_budget is .*Give at least 1\.1MiB"):
        make_index(tmp_path / "tiny", vectors, memory_budget="1KiB")
    with pytest.raises(UserError, match="91 index shards were asked for, but there are only 90"):
        make_index(tmp_path / "many", vectors, shards=91)


@pytest.mark.parametrize("shards", [7, 60])
def test_as_many_shards_as_asked_for(tmp_path: Path, vectors: str, shards: int) -> None:
    rows = [shard.rows for shard in Artifact(make_index(tmp_path, vectors, shards=shards)).shards]
    assert (len(rows), sum(rows)) == (shards, DOCUMENTS)
    assert max(rows) - min(rows) <= 1


def test_a_gpu_trains_fills_and_searches_an_index_where_it_is_asked_for(tmp_path, collection, vectors, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(vector_index, "to_gpu", lambda index: (asked.append(index.ntotal), index)[1])
    monkeypatch.setattr(vector_index.import_faiss(), "index_gpu_to_cpu", lambda index: index, raising=False)
    for gpus, counts in ((0, []), (0.5, [0, 0, DOCUMENTS])):
        on, output = {"gpus_per_worker": gpus}, f"{tmp_path}/{gpus}"
        settings = VectorIndexSettings(vectors=vectors, factory="IVF2,Flat")
        index = make(Index(IndexConfig(index=settings, resources=on, output=f"{output}/index")))
        search(Path(output), index=index, collection=collection, vectors=vectors, resources=on)
        assert asked == counts


def test_a_damaged_or_missing_shard_is_named(tmp_path: Path, collection: str, vectors: str) -> None:
    index = make_index(tmp_path, vectors, shards=3)
    shard = Path(index) / "shards" / "00001.faiss"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match=r"shards/00001\.faiss is damaged: its SHA-256 differs"):
        search(tmp_path, index=index, collection=collection, vectors=vectors)
    shard.unlink()
    with pytest.raises(UserError, match=r"shards/00001\.faiss is missing"):
        search(tmp_path, index=index, collection=collection, vectors=vectors)


def test_an_index_and_queries_that_do_not_belong_together_are_refused(tmp_path, collection, index, vectors):
    other = make_vectors(tmp_path / "other", collection, query_prompt="", max_length=32)
    with pytest.raises(UserError, match="come from different encoders: query_prompt 'query: ' against ''; max_length"):
        search(tmp_path / "x", index=index, collection=collection, vectors=other)
    run = search(tmp_path, index=index, collection=collection, vectors=vectors)
    encoder = CONTRACT | {"dimension": DIMENSION}
    foreign = make_artifact(tmp_path / "f", "vectors", {"collection": "0" * 64}, {"encoder": encoder}, {}, 0)
    with pytest.raises(UserError, match="don't come from the same collection"):
        rerank(tmp_path, run, foreign, collection)


def test_no_document_is_nothing_to_index(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"collection has no document for BM25\. Collect from a source that has some"):
        make_bm25(tmp_path, collection_of(tmp_path / "collection", []))


def test_lexical_search_fused_and_re_ranked(tmp_path: Path, collection: str, vectors: str, bm25: str) -> None:
    searched = {"collection": collection, "top_k": 20}
    run = search(tmp_path, index=bm25, **searched, queries_per_shard=4)
    assert run.system["index"] == "BM25"
    assert next(iter(read_ranking_file(run.path("run.trec"))["q7"])) == "d7"  # the only one with t7 in its title
    shards = make_bm25(tmp_path / "shards", collection, documents_per_shard=7)
    assert [record.rows for record in Artifact(shards).shards if record.rows][:2] == [7, 7]
    alike = search(tmp_path / "shards-run", index=shards, **searched)
    assert alike.path("run.trec").read_bytes() == run.path("run.trec").read_bytes()
    with pytest.raises(UserError, match=r"search_parameters is 'nprobe=8', but .*bm25 is a BM25 index, which has none"):
        search(tmp_path / "set", index=bm25, collection=collection, search_parameters="nprobe=8")
    untitled = make_bm25(tmp_path / "untitled", collection, with_title=False)
    without = search(tmp_path / "without", index=untitled, **searched)
    assert without.system["with_title"] is False
    assert next(iter(read_ranking_file(without.path("run.trec"))["q7"])) != "d7"

    reranked = rerank(tmp_path, run, vectors, collection, queries_per_shard=6)
    made_with = [reranked.system.get(name) for name in ("index", "query_prompt", "model", "reranked")]
    assert made_with == ["BM25", "query: ", None, 100]
    before, after = (read_ranking_file(each.path("run.trec")) for each in (run, reranked))
    found = [{query: set(documents) for query, documents in each.items()} for each in (before, after)]
    assert found[0] == found[1]
    queries, documents = values(vectors, "queries").astype(float), values(vectors, "documents").astype(float)
    for query, found in after.items():
        expected = {name: float(queries[int(query[1:])] @ documents[int(name[1:])]) for name in found}
        assert list(found) == sorted(expected, key=lambda name: -expected[name])
        assert found == pytest.approx(expected, rel=1e-6)

    runs = {"lexical": run.uri, "dense": reranked.uri}
    fused, in_blocks = (fuse(tmp_path / str(size), runs, queries_per_shard=size) for size in (8192, 3))
    assert fused.query_ids() == run.query_ids()
    assert [shard.files for shard in fused.shards] == [shard.files for shard in in_blocks.shards]
    assert len(list(read_ranking_file(fused.path("run.trec")))) == len(run.query_ids()) > 3
    assert fused.system["with_title"] is True


def test_runs_bear_their_tag_and_a_task_takes_the_queries_that_are_set(tmp_path, collection, vectors, index, bm25):
    """However the work is cut the run is the same, so that the tasks alone tell."""
    run = search(tmp_path, index=bm25, collection=collection, top_k=20)
    of_vectors, cut = {"collection": collection, "vectors": vectors}, {"queries_per_shard": 7, "tag": "mine"}
    output = str(tmp_path / "out")
    for stage in (
        Search(SearchConfig(index=index, **of_vectors, **cut, output=f"{output}/s")),
        Rerank(RerankConfig(run=run.uri, **of_vectors, **cut, output=f"{output}/r")),
        Fuse(FuseConfig(runs={"a": run.uri, "b": run.uri}, **cut, output=f"{output}/f")),
    ):
        assert len(stage.phases()[0].tasks) == 3  # of 20 queries
        lines = StoredRanking(make(stage)).path("run.trec").read_text().splitlines()
        assert {line.split()[-1] for line in lines} == {"mine"}


def test_how_deep_runs_are_read_and_how_many_documents_are_kept(tmp_path, collection, vectors, index) -> None:
    run = search(tmp_path, index=index, collection=collection, vectors=vectors, top_k=20)
    anew = rerank(tmp_path, run, vectors, collection, depth=5, top_k=3)
    np.testing.assert_array_equal(anew.ranking().rows, run.ranking().rows[:, :3])
    assert (anew.system["reranked"], anew.system["top_k"]) == (5, 3)
    all_of_them = rerank(tmp_path / "all", run, vectors, collection, depth=5)
    assert (all_of_them.ranking().rows.shape[1], all_of_them.system["top_k"]) == (5, 5)
    fused = fuse(tmp_path, {"a": run.uri, "b": run.uri}, rank_constant=1, depth=4)
    expected = np.tile(np.float32([2 / (1 + rank) for rank in range(1, 5)]), (QUERIES - 1, 1))
    np.testing.assert_allclose(fused.ranking().scores, expected)
    assert fused.system["fusion"] == "reciprocal rank, k = 1, top 4"


def test_what_does_not_go_together_is_refused_before_the_first_task(tmp_path, collection, vectors, index, bm25) -> None:
    def refused(message: str, stage: Any) -> None:
        with pytest.raises(UserError, match=message):
            stage.phases()

    def searching(**settings: Any) -> Search:
        return Search(SearchConfig(**{"collection": collection} | settings, output=str(tmp_path / "searched")))

    def reranking(**settings: Any) -> Rerank:
        given = {"collection": collection, "run": run.uri, "vectors": vectors} | settings
        return Rerank(RerankConfig(**given, output=str(tmp_path / "reranked")))

    def part(name: str, **contract: Any) -> str:
        of_part = {name: (values(vectors, name), [f"{name[0]}{row}" for row in range(len(values(vectors, name)))])}
        folder = tmp_path / "-".join((name, *contract))
        return stored_vectors(folder, collection, of_part, **{"query_prompt": "query: "} | contract)

    run = search(tmp_path, index=bm25, collection=collection)
    refused("is a BM25 index and takes texts; leave 'vectors' out", searching(index=bm25, vectors=vectors))
    refused("is an index of vectors: name the 'vectors' artifact", searching(index=index))
    refused("'nprobe=8' don't fit", searching(index=index, vectors=vectors, search_parameters="nprobe=8"))
    refused("has no query of domain 'space'", searching(index=bm25, domain="space"))
    other = beir_collection(tmp_path / "other", [("d", "", "wing")], [("q1", "wing")], [("q1", "d")])
    refused("don't come from the same collection", searching(index=bm25, collection=other))
    theirs = search(tmp_path / "theirs", index=make_bm25(tmp_path / "o", other), collection=other)
    refused(f"{theirs.uri} don't come from the same collection", reranking(run=theirs.uri))
    both = Fuse(FuseConfig(runs={"ours": run.uri, "theirs": theirs.uri}, output=str(tmp_path / "both")))
    refused(f"{theirs.uri} don't come from the same collection", both)
    refused("holds no vectors of documents", reranking(vectors=part("queries")))
    refused("holds no vectors of queries", reranking(vectors=part("documents")))
    refused("come from different encoders", reranking(query_vectors=part("queries", max_length=9)))
    foreign = stored_vectors(tmp_path / "foreign", other, {"queries": (values(vectors, "queries")[:1], ["q1"])})
    refused("don't come from the same collection", reranking(query_vectors=foreign))
    (tmp_path / "empty.trec").touch()
    refused("answers no query, so there is nothing to rerank", reranking(run=str(tmp_path / "empty.trec")))
    every_query = search(tmp_path / "every", index=bm25, collection=collection, split=None)
    runs = {"judged": run.uri, "all": every_query.uri}
    refused("answer different queries. Search both with one", Fuse(FuseConfig(runs=runs, output=str(tmp_path / "f"))))


def test_the_queries_of_another_collection(tmp_path, collection, vectors, index, bm25) -> None:
    asked = [("x", "shock of t4"), ("y", "t7")]
    others = beir_collection(tmp_path / "others", NOWHERE, asked, [("y", "other")])
    searched = {"index": bm25, "collection": collection, "queries": others, "top_k": 5}
    found = read_ranking_file(search(tmp_path / "lexical", **searched, split=None).path("run.trec"))
    assert {query: next(iter(documents)) for query, documents in found.items()} == {"x": "d4", "y": "d7"}
    assert search(tmp_path / "judged", **searched).query_ids() == ["y"]
    two = np.random.default_rng(2).standard_normal((2, DIMENSION)).astype(np.float16)
    of_others = stored_vectors(tmp_path / "asked", others, {"queries": (two, ["x", "y"])}, query_prompt="query: ")
    searched = {"index": index, "collection": collection, "queries": others, "split": None, "top_k": 9}
    run = search(tmp_path / "dense", vectors=of_others, **searched)
    expected = search_stored(two, values(vectors, "documents").astype(np.float32), 9)
    np.testing.assert_array_equal(run.ranking().rows, expected.rows)
    assert run.manifest["inputs"]["queries"] == StoredCollection(others).fingerprint
    with pytest.raises(UserError, match="don't come from the same collection"):
        search(tmp_path / "mixed", vectors=vectors, **searched)
    # an id of theirs may be another query here
    with pytest.raises(UserError, match=rf"{OTHER_QUERIES} .* Evaluate it with a qrels file"):
        rerank(tmp_path, run, vectors, collection)
    with pytest.raises(UserError, match=OTHER_QUERIES):
        make(Mine(MineConfig(run=run.uri, collection=collection, split="test", output=str(tmp_path / "mined"))))
    assert_not_evaluated(run, collection, tmp_path)


def assert_not_evaluated(run: StoredRanking, collection: str, folder: Path) -> None:
    evaluate = EvaluateConfig(runs={"theirs": run.uri}, collection=collection, output=str(folder / "evaluated"))
    with pytest.raises(UserError, match=OTHER_QUERIES):
        make(Evaluate(evaluate))


def test_a_fusion_says_whose_queries_it_answers(tmp_path: Path, collection: str, bm25: str) -> None:
    """Queries of two more collections, by the same ids: nothing but their origin tells them apart."""
    asked = {"own": collection}
    for name, text in (("theirs", "shock of t4"), ("others", "t7")):
        queries = [(f"q{row}", text) for row in range(QUERIES)]
        asked[name] = beir_collection(tmp_path / name, NOWHERE, queries, [("q0", "other")])
    searched = {"index": bm25, "collection": collection, "split": None, "top_k": 5}
    runs = {name: search(tmp_path / name, queries=queries, **searched).uri for name, queries in asked.items()}
    runs["plain"] = search(tmp_path / "plain", **searched).uri

    def fused(*names: str) -> StoredRanking:
        return fuse(tmp_path / "-".join(names), {name: runs[name] for name in names})

    for names in (("plain", "theirs"), ("theirs", "plain"), ("own", "others"), ("theirs", "others")):
        with pytest.raises(UserError, match="answer the queries of different collections") as raised:
            fused(*names)
        assert all(runs[name] in str(raised.value) for name in names)
    own = {"collection": StoredCollection(collection).fingerprint}
    assert fused("plain", "own").manifest["facts"]["origins"] == own
    runs["again"] = search(tmp_path / "again", queries=asked["theirs"], **(searched | {"top_k": 9})).uri
    foreign = fused("theirs", "again")
    theirs = StoredCollection(asked["theirs"]).fingerprint
    assert foreign.manifest["facts"]["origins"] == own | {"queries": theirs}
    assert_not_evaluated(foreign, collection, tmp_path)
