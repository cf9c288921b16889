"""Index, search, rerank and fuse as stages: the same run however the work is cut, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.mine import Mine, MineConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.indexes.exact_search import search_stored
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.fuse import Fuse, FuseConfig
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings, id_blocks
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking, read_ranking_file
from tests.unit.pipelines.jobs.test_group import collection_of
from tests.unit.small_run import make, make_artifact

pytest.importorskip("faiss", reason="FAISS is not installed")

DOCUMENTS, QUERIES, DIMENSION = 90, 21, 8
CONTRACT = {
    "model": "m" * 16,
    "pooling": "mean",
    "normalize": True,
    "query_prompt": "query: ",
    "document_prompt": "",
    "max_length": 16,
    "dtype": "float32",
    "dimension": DIMENSION,
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("beir")
    (folder / "qrels").mkdir()
    words = ["wing", "lift", "drag", "flow", "shock", "heat", "plate", "cone", "jet", "wave"]
    documents = [
        f'{{"_id": "d{row}", "title": "t{row}", "text": "{words[row % 10]} {words[row // 10]}"}}\n'
        for row in range(DOCUMENTS)
    ]
    (folder / "corpus.jsonl").write_text("".join(documents))
    queries = [f'{{"_id": "q{row}", "text": "{words[row % 10]} of t{row}"}}\n' for row in range(QUERIES)]
    (folder / "queries.jsonl").write_text("".join(queries))
    judged = [f"q{row}\td{row}\t1\n" for row in range(QUERIES) if row != 3]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    source = BeirFolder(path=str(folder))
    return make(Collect(CollectConfig(source=source, output=str(folder / "collection"))))


def make_vectors(folder: Path, collection: str, shape: tuple[int, ...] = (), **contract: Any) -> str:
    generator = np.random.default_rng(1)
    files: dict[str, Any] = {}
    for part, count, inner in (("documents", DOCUMENTS, shape), ("queries", QUERIES, ())):
        values = generator.standard_normal((count, *inner, DIMENSION)).astype(np.float16)
        for number, rows in enumerate(np.array_split(np.arange(count), 4)):
            files[f"{part}/{number:05d}.npy"] = values[rows]
            files[f"{part}/{number:05d}.ids.parquet"] = pa.table({"id": [f"{part[0]}{row}" for row in rows]})
    inputs = {"collection": StoredCollection(collection).fingerprint}
    return make_artifact(folder, "vectors", inputs, {"encoder": CONTRACT | contract}, files, DOCUMENTS + QUERIES)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, collection: str) -> str:
    return make_vectors(tmp_path_factory.mktemp("vectors"), collection)


def values(vectors: str, part: str) -> NDArray[Any]:
    artifact = Artifact(vectors)
    return np.concatenate([np.load(artifact.path(name)) for name in artifact.names(f"{part}/", ".npy")])


def make_index(folder: Path, vectors: str, **settings: Any) -> str:
    index = VectorIndexSettings(vectors=vectors, **settings)
    return make(Index(IndexConfig(index=index, output=str(folder / "index"))))


def search(folder: Path, **settings: Any) -> StoredRanking:
    return StoredRanking(make(Search(SearchConfig(output=str(folder / "run"), **settings))))


@pytest.mark.parametrize(("shards", "queries_per_shard"), [(1, 100), (2, 7), (5, 1)])
def test_the_run_does_not_depend_on_how_the_work_is_cut(tmp_path, collection, vectors, shards, queries_per_shard):
    index = make_index(tmp_path, vectors, shards=shards)
    run = search(
        tmp_path,
        index=index,
        collection=collection,
        vectors=vectors,
        split=None,
        top_k=30,
        queries_per_shard=queries_per_shard,
    )
    exact = search_stored(values(vectors, "queries"), values(vectors, "documents").astype(np.float32), 30)
    np.testing.assert_array_equal(run.ranking().rows, exact.rows)
    np.testing.assert_array_equal(run.ranking().scores, exact.scores)
    assert run.query_ids() == [f"q{row}" for row in range(QUERIES)]
    assert pa.concat_arrays(id_blocks(Artifact(index))).to_pylist() == [f"d{row}" for row in range(DOCUMENTS)]
    lines = read_ranking_file(run.path("run.trec"))
    assert list(lines["q5"]) == [f"d{row}" for row in exact.rows[5]]
    assert run.system["index"] == "Flat"
    assert run.system["query_prompt"] == "query: "
    assert run.system["with_title"] is True


def test_a_split_names_the_queries_it_judges(tmp_path: Path, collection: str, vectors: str) -> None:
    run = search(tmp_path, index=make_index(tmp_path, vectors), collection=collection, vectors=vectors)
    assert run.query_ids() == [f"q{row}" for row in range(QUERIES) if row != 3]
    with pytest.raises(UserError, match="no judgments of split 'dev'"):
        search(tmp_path / "x", index=str(tmp_path / "index"), collection=collection, vectors=vectors, split="dev")


def test_documents_of_several_vectors(tmp_path: Path, collection: str) -> None:
    vectors = make_vectors(tmp_path / "vectors", collection, (3,))
    index = make_index(tmp_path, vectors, shards=4)
    run = search(tmp_path, index=index, collection=collection, vectors=vectors, split=None, top_k=DOCUMENTS)
    queries = values(vectors, "queries").astype(np.float32)
    documents = values(vectors, "documents").astype(np.float32)
    scores = np.einsum("qd,nmd->qnm", queries, documents).max(axis=2)
    np.testing.assert_array_equal(run.ranking().rows, np.argsort(-scores, axis=1, kind="stable"))
    anew = make(
        Rerank(
            RerankConfig(run=run.uri, vectors=vectors, collection=collection, depth=20, output=str(tmp_path / "anew"))
        )
    )
    np.testing.assert_array_equal(StoredRanking(anew).ranking().rows, run.ranking().rows[:, :20])


def test_the_memory_budget_sets_the_shards(tmp_path: Path, collection: str, vectors: str) -> None:
    whole = Artifact(make_index(tmp_path, vectors, memory_budget="64MiB"))
    assert len(whole.shards) == 1
    reading = 2 * 4 * 16_384 * DIMENSION
    budget = reading + 3 * 4 * DIMENSION * 40
    cut = Artifact(make_index(tmp_path / "small", vectors, memory_budget=budget))
    assert [shard.rows for shard in cut.shards] == [30, 30, 30]
    with pytest.raises(UserError, match=r"index\.memory_budget is .*Give at least"):
        make_index(tmp_path / "tiny", vectors, memory_budget="1KiB")
    with pytest.raises(UserError, match="91 index shards were asked for, but there are only 90"):
        make_index(tmp_path / "many", vectors, shards=91)
    assert collection


@pytest.mark.parametrize("shards", [4, 7, 60, 90])
def test_as_many_shards_as_asked_for(tmp_path: Path, vectors: str, shards: int) -> None:
    rows = [shard.rows for shard in Artifact(make_index(tmp_path, vectors, shards=shards)).shards]
    assert (len(rows), sum(rows)) == (shards, DOCUMENTS)
    assert max(rows) - min(rows) <= 1


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


def test_an_index_and_queries_of_different_encoders_are_refused(tmp_path: Path, collection: str, vectors: str) -> None:
    other = make_vectors(tmp_path / "other", collection, query_prompt="", max_length=32)
    with pytest.raises(UserError, match="come from different encoders: query_prompt 'query: ' against ''; max_length"):
        search(tmp_path, index=make_index(tmp_path, vectors), collection=collection, vectors=other)


def test_a_hostile_artifact_links_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    index = make_artifact(tmp_path / "index", "index", {}, {}, {"lexical/params.json": "{}"}, 1)
    manifest = tmp_path / "index" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("lexical/params.json", "lexical/../../escaped.py"))
    (tmp_path / "escaped.py").write_text("{}")
    with pytest.raises(UserError, match=r"'lexical/\.\./\.\./escaped\.py' is no name of a file inside the folder"):
        Artifact(index).local_folder()


def test_no_document_is_nothing_to_index(tmp_path: Path) -> None:
    empty = LexicalIndexSettings(collection=collection_of(tmp_path / "collection", []))
    with pytest.raises(UserError, match=r"collection has no document for BM25\. Collect one"):
        make(Index(IndexConfig(index=empty, output=str(tmp_path / "bm25"))))


def test_lexical_search_fused_and_re_ranked(tmp_path: Path, collection: str, vectors: str) -> None:
    settings = LexicalIndexSettings(collection=collection)
    lexical = make(Index(IndexConfig(index=settings, output=str(tmp_path / "bm25"))))
    run = search(tmp_path, index=lexical, collection=collection, top_k=20, queries_per_shard=4)
    assert run.system["index"] == "BM25"
    assert next(iter(read_ranking_file(run.path("run.trec"))["q7"])) == "d7"  # the only one with t7 in its title
    in_shards = LexicalIndexSettings(collection=collection, documents_per_shard=7)
    shards = make(Index(IndexConfig(index=in_shards, output=str(tmp_path / "shards"))))
    assert [record.rows for record in Artifact(shards).shards if record.rows][:2] == [7, 7]
    alike = search(tmp_path / "shards-run", index=shards, collection=collection, top_k=20)
    assert alike.path("run.trec").read_bytes() == run.path("run.trec").read_bytes()
    with pytest.raises(UserError, match=r"search_parameters is 'nprobe=8', but .*bm25 is a BM25 index, which has none"):
        search(tmp_path / "set", index=lexical, collection=collection, search_parameters="nprobe=8")
    untitled = LexicalIndexSettings(collection=collection, with_title=False)
    index = make(Index(IndexConfig(index=untitled, output=str(tmp_path / "untitled"))))
    without = search(tmp_path / "without", index=index, collection=collection, top_k=20)
    assert without.system["with_title"] is False
    assert next(iter(read_ranking_file(without.path("run.trec"))["q7"])) != "d7"
    config = RerankConfig(run=run.uri, vectors=vectors, collection=collection, output=str(tmp_path / "anew"))
    reranked = StoredRanking(make(Rerank(config.model_copy(update={"queries_per_shard": 6}))))
    before, after = (read_ranking_file(each.path("run.trec")) for each in (run, reranked))
    assert {query: set(found) for query, found in before.items()} == {
        query: set(found) for query, found in after.items()
    }
    queries, documents = values(vectors, "queries").astype(float), values(vectors, "documents").astype(float)
    for query, found in after.items():
        expected = {name: float(queries[int(query[1:])] @ documents[int(name[1:])]) for name in found}
        assert list(found) == sorted(expected, key=lambda name: -expected[name])
        assert found == pytest.approx(expected, rel=1e-6)
    runs = {"lexical": run.uri, "dense": reranked.uri}
    fused, in_blocks = (
        StoredRanking(make(Fuse(FuseConfig(runs=runs, output=str(tmp_path / f"fused-{size}"), queries_per_shard=size))))
        for size in (8192, 3)
    )
    assert fused.query_ids() == run.query_ids()
    assert [shard.files for shard in fused.shards] == [shard.files for shard in in_blocks.shards]
    assert len(list(read_ranking_file(fused.path("run.trec")))) == len(run.query_ids()) > 3
    assert fused.system["with_title"] is True


def test_rerank_refuses_another_collections_run(tmp_path: Path, collection: str, vectors: str) -> None:
    run = search(tmp_path, index=make_index(tmp_path, vectors), collection=collection, vectors=vectors)
    foreign = make_artifact(tmp_path / "f", "vectors", {"collection": "0" * 64}, {"encoder": CONTRACT}, {}, 0)
    config = RerankConfig(run=run.uri, vectors=foreign, collection=collection, output=str(tmp_path / "o"))
    with pytest.raises(UserError, match="don't come from the same collection"):
        make(Rerank(config))


def test_the_queries_of_another_collection(tmp_path: Path, collection: str, vectors: str) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "other", "text": "no matter"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "x", "text": "shock of t4"}\n{"_id": "y", "text": "t7"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\ny\tother\t1\n")
    source = BeirFolder(path=str(tmp_path))
    others = make(Collect(CollectConfig(source=source, output=str(tmp_path / "others"))))
    settings = LexicalIndexSettings(collection=collection)
    lexical = make(Index(IndexConfig(index=settings, output=str(tmp_path / "bm25"))))
    run = search(tmp_path / "lexical", index=lexical, collection=collection, queries=others, split=None, top_k=5)
    found = read_ranking_file(run.path("run.trec"))
    assert {query: next(iter(documents)) for query, documents in found.items()} == {"x": "d4", "y": "d7"}
    judged = search(tmp_path / "judged", index=lexical, collection=collection, queries=others, top_k=5)
    assert judged.query_ids() == ["y"]
    two = np.random.default_rng(2).standard_normal((2, DIMENSION)).astype(np.float16)
    files = {"queries/00000.npy": two, "queries/00000.ids.parquet": pa.table({"id": ["x", "y"]})}
    inputs = {"collection": StoredCollection(others).fingerprint}
    asked = make_artifact(tmp_path / "asked", "vectors", inputs, {"encoder": CONTRACT}, files, 2)
    searched = {"index": make_index(tmp_path, vectors), "collection": collection, "split": None, "top_k": 9}
    run = search(tmp_path / "dense", queries=others, vectors=asked, **searched)
    np.testing.assert_array_equal(
        run.ranking().rows, search_stored(two, values(vectors, "documents").astype(np.float32), 9).rows
    )
    assert run.manifest["inputs"]["queries"] == StoredCollection(others).fingerprint
    with pytest.raises(UserError, match="don't come from the same collection"):
        search(tmp_path / "mixed", queries=others, vectors=vectors, **searched)
    config = RerankConfig(run=run.uri, vectors=vectors, collection=collection, output=str(tmp_path / "anew"))
    # an id of theirs may be another query here
    with pytest.raises(UserError, match=r"answers the queries of another collection .* Judge it by a qrels file"):
        make(Rerank(config))
    mine = MineConfig(run=run.uri, collection=collection, split="test", output=str(tmp_path / "mined"))
    with pytest.raises(UserError, match="answers the queries of another collection"):
        make(Mine(mine))
    evaluate = EvaluateConfig(runs={"theirs": run.uri}, collection=collection, output=str(tmp_path / "evaluated"))
    with pytest.raises(UserError, match="answers the queries of another collection"):
        make(Evaluate(evaluate))


def test_a_fusion_says_whose_queries_it_answers(tmp_path: Path, collection: str) -> None:
    """Queries of two more collections, by the same ids: nothing but their origin tells them apart."""
    lexical = make(Index(IndexConfig(index=LexicalIndexSettings(collection=collection), output=str(tmp_path / "bm25"))))
    asked = {"own": collection}
    for name, text in (("theirs", "shock of t4"), ("others", "t7")):
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        (folder / "corpus.jsonl").write_text('{"_id": "d0", "text": "no matter"}\n')
        queries = [f'{{"_id": "q{row}", "text": "{text}"}}\n' for row in range(QUERIES)]
        (folder / "queries.jsonl").write_text("".join(queries))
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
        source = BeirFolder(path=str(folder))
        asked[name] = make(Collect(CollectConfig(source=source, output=str(folder / "collection"))))
    searched = {"index": lexical, "collection": collection, "split": None, "top_k": 5}
    runs = {name: search(tmp_path / name, queries=queries, **searched).uri for name, queries in asked.items()}
    runs["plain"] = search(tmp_path / "plain", **searched).uri

    def fused(*names: str) -> StoredRanking:
        config = FuseConfig(runs={name: runs[name] for name in names}, output=str(tmp_path / "-".join(names)))
        return StoredRanking(make(Fuse(config)))

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
    evaluate = EvaluateConfig(runs={"x": foreign.uri}, collection=collection, output=str(tmp_path / "evaluated"))
    with pytest.raises(UserError, match="answers the queries of another collection"):
        make(Evaluate(evaluate))
