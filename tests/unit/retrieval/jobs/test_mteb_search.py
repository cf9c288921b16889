"""Our stages and our encoder as models of MTEB, on tasks made here: its own search is the oracle. No Ray."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import UserError
from raytriever.stages.stage import Shard, Stage
from retrieval.collections.collection import StoredCollection
from retrieval.indexes.top_k import Ranking
from retrieval.jobs.mteb_search import RaytrieverSearch, candidate_rows, scores_by_id
from retrieval.mteb_encoder import RaytrieverEncoder, result_name
from tests.unit.retrieval.mteb_tasks import (
    DOCUMENTS,
    QUERIES,
    Flight,
    FlightReranking,
    FlightTalk,
    FlightTwice,
    StoredEncoder,
    evaluate,
    predictions,
    save_encoder,
)

pytest.importorskip("faiss", reason="FAISS is not installed")


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def execute(self: Stage[Any], pending: list[Shard], *_: Any) -> Iterator[ShardRecord]:
        if pending:
            self.load()
        for shard in pending:
            yield self.make_shard(shard)

    monkeypatch.setattr(Stage, "execute", execute)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are slower for a model this small
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def searching(folder: Path, encoder: str, **settings: Any) -> RaytrieverSearch:
    embed = {"encoder": {"model": encoder, "dtype": "float32"}, "texts_per_shard": 50}
    return RaytrieverSearch(str(folder), embed=embed, **settings)


@pytest.mark.parametrize("task", [Flight(), FlightReranking()], ids=["retrieval", "re-ranking"])
def test_the_same_as_mtebs_own_search_over_the_same_vectors(encoder: str, tmp_path: Path, task: Any) -> None:
    ours = searching(tmp_path, encoder, index={"index": {"kind": "vectors", "shards": 3}})
    scores = evaluate(ours, task, tmp_path / "ours")
    name = task.metadata.name
    expected = evaluate(StoredEncoder(encoder, tmp_path / name / "default" / "test"), task, tmp_path / "mteb")
    assert 0.05 < expected["ndcg_at_10"] < 1
    for measure, value in expected.items():
        if measure.endswith(("_at_1", "_at_10", "_at_100")) and "nauc" not in measure:
            assert scores[measure] == pytest.approx(value, abs=1e-6), measure
    found, by_mteb = predictions(tmp_path / "ours", name), predictions(tmp_path / "mteb", name)
    assert found.keys() == by_mteb.keys()
    for query, documents in by_mteb.items():
        assert found[query] == pytest.approx(documents, abs=1e-6)


@pytest.mark.parametrize("task", [Flight(), FlightReranking()], ids=["retrieval", "re-ranking"])
def test_the_encoder_alone_the_exported_one_and_the_search(encoder: str, tmp_path: Path, task: Any) -> None:
    from sentence_transformers import SentenceTransformer

    models = {
        "encoder": RaytrieverEncoder(encoder, device="cpu", dtype="float32"),
        "exported": SentenceTransformer(encoder, device="cpu"),
        "search": searching(tmp_path, encoder),
    }
    scores = {name: evaluate(model, task, tmp_path / name) for name, model in models.items()}
    assert scores["exported"]["ndcg_at_10"] == pytest.approx(scores["encoder"]["ndcg_at_10"], abs=1e-6)
    expected = predictions(tmp_path / "encoder", task.metadata.name)
    for name, tolerance in (("exported", 1e-5), ("search", 2e-3)):  # a search stores vectors in half precision
        found = predictions(tmp_path / name, task.metadata.name)
        for query, documents in expected.items():
            assert found[query] == pytest.approx(documents, abs=tolerance)


def test_a_second_evaluation_reuses_all_and_another_index_the_vectors(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = evaluate(searching(tmp_path, encoder), Flight())
    parts = ("documents", "document_vectors", "queries", "query_vectors", "index", "run")
    capsys.readouterr()
    assert evaluate(searching(tmp_path, encoder), Flight()) == first
    said = capsys.readouterr().err
    assert [part for part in parts if f"Flight/default/test/{part}: reused" in said] == list(parts)
    other = searching(tmp_path, encoder, index={"index": {"kind": "vectors", "factory": "SQfp16"}})
    assert evaluate(other, Flight())["ndcg_at_10"] == pytest.approx(first["ndcg_at_10"], abs=1e-4)
    assert capsys.readouterr().err.count(": reused") == 4
    stored = StoredCollection(str(tmp_path / "Flight/default/test/documents"))
    assert (stored.count("documents"), stored.count("queries")) == (DOCUMENTS, 0)
    queries = StoredCollection(str(tmp_path / "Flight/default/test/queries")).rows_of("queries").read(["id", "text"])
    assert queries["id"].to_pylist() == [f"q{row}" for row in range(QUERIES - 1)]  # the last is not judged
    assert queries["text"][1].as_py().endswith("? No patents.")


def test_bm25_needs_no_encoder(tmp_path: Path) -> None:
    bm25 = RaytrieverSearch(str(tmp_path), index={"index": {"kind": "lexical"}})
    assert evaluate(bm25, Flight())["ndcg_at_10"] > 0.3
    assert bm25.mteb_model_meta.model_type == ["sparse"]
    assert bm25.mteb_model_meta.experiment_kwargs["bm25"]["k1"] == 0.9
    evaluate(bm25, FlightTalk())
    talk = StoredCollection(str(tmp_path / "FlightTalk/default/test/queries"))
    assert talk.texts("queries", np.array([0]))[0].endswith("?; system: Why?")
    with pytest.raises(UserError, match="BM25 ranks whole corpora"):
        evaluate(bm25, FlightReranking())


def test_what_mteb_is_told_of_the_model(encoder: str, tmp_path: Path) -> None:
    meta = searching(tmp_path, encoder).mteb_model_meta
    assert meta.name == "raytriever/tiny"
    assert (meta.embed_dim, meta.max_tokens, meta.similarity_fn_name.value) == (32, 48, "cosine")
    assert meta.n_parameters == RaytrieverEncoder(encoder).mteb_model_meta.n_parameters > 10_000
    assert meta.use_instructions
    assert meta.training_datasets is None
    assert meta.experiment_kwargs["query_prompt"] == "the index of "
    cut = searching(tmp_path, encoder, index={"index": {"kind": "vectors", "factory": "IVF4,Flat"}})
    few = searching(tmp_path, encoder, search={"search_parameters": "nprobe=2"}, name="our/name")
    names = {model.mteb_model_meta.experiment_name for model in (searching(tmp_path, encoder), cut, few)}
    assert len(names) == 3  # MTEB keeps their results apart
    assert few.mteb_model_meta.name == "our/name"
    assert result_name("org/name") == "org/name"
    assert not list(tmp_path.iterdir())


def test_a_text_without_a_role_has_no_prompt(encoder: str) -> None:
    from mteb.types import PromptType
    from sentence_transformers import SentenceTransformer

    ours = RaytrieverEncoder(encoder, device="cpu", dtype="float32")
    exported = SentenceTransformer(encoder, device="cpu")
    texts = ["the wing of a plane", "heat"]
    for role, prompt in ((None, None), (PromptType.query, "query"), (PromptType.document, "document")):
        task = {"task_metadata": Flight.metadata, "hf_split": "test", "hf_subset": "default"}
        found = ours.encode([{"text": texts[:1]}, {"text": texts[1:]}], prompt_type=role, **task)
        expected = exported.encode(texts, prompt_name=prompt, prompt=None if prompt else "")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(
        ours.similarity(found, found).diagonal(), ours.similarity_pairwise(found, found), rtol=1e-6
    )
    with pytest.raises(UserError, match="precision 'int8' is not supported"):
        ours.encode([], prompt_type=None, precision="int8", **task)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "embed: 'encoder' is missing"),
        ({"embed": {"encodr": 1}}, "'encodr' is not a setting. Did you mean 'encoder'"),
        ({"embed": {"collection": "x"}}, "embed: 'collection' follows from MTEB's task"),
        ({"search": {"top_k": 5}}, "search: 'top_k' follows from MTEB's task"),
        ({"index": {"index": {"kind": "vectors", "vectors": "x"}}}, "index.index: 'vectors' follows"),
        ({"index": {"factory": "Flat"}}, "index.index is None"),
        ({"index": {"index": "Flat"}}, "index.index is 'Flat'; give a mapping"),
        ({"index": {"index": {"kind": "lexical"}}, "embed": {}}, "leave 'embed' out"),
        ({"index": {"index": {"kind": "lexicall"}}}, "Did you mean 'lexical'"),
    ],
)
def test_settings_that_are_none_are_named(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as refused:
        RaytrieverSearch(str(tmp_path), **settings)
    assert expected in str(refused.value)


def test_without_mteb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    for make in (lambda: RaytrieverSearch(str(tmp_path)), lambda: RaytrieverEncoder("org/name")):
        with pytest.raises(UserError, match=r"pip install 'raytriever\[mteb\]'"):
            make()


def test_what_is_refused_while_searching(encoder: str, tmp_path: Path) -> None:
    search = searching(tmp_path, encoder)
    with pytest.raises(UserError, match=r"The documents of .*FlightTwice.*: id 'd/000 ü' stands in 2 rows"):
        evaluate(search, FlightTwice())
    task = {"task_metadata": Flight.metadata, "hf_split": "test", "hf_subset": "default", "encode_kwargs": {}}
    with pytest.raises(UserError, match=r"last called for nothing; call it for .*/Flight/default/test first"):
        search.search(Dataset.from_list([]), top_k=3, **task)
    with pytest.raises(UserError, match="precision 'int8'"):
        search.index(Dataset.from_list([]), **(task | {"encode_kwargs": {"precision": "int8"}}))
    with pytest.raises(UserError, match="name is 'plain'"):
        searching(tmp_path, encoder, name="plain").mteb_model_meta  # noqa: B018


def test_candidates_and_scores_by_id() -> None:
    ids = pa.array(["a", "b", "c"])
    rows = candidate_rows([["c", "a"], [], ["b"]], ids, "here")
    np.testing.assert_array_equal(rows, [[2, 0], [-1, -1], [1, -1]])
    assert candidate_rows([[]], ids, "here").tolist() == [[-1]]
    with pytest.raises(UserError, match="here: the candidates name document 'x'"):
        candidate_rows([["a", "x"]], ids, "here")
    ranking = Ranking(rows, np.array([[3, 2], [-np.inf, -np.inf], [1, -np.inf]], dtype=np.float32))
    assert scores_by_id(ranking, ["p", "q", "r"], ids) == {"p": {"c": 3.0, "a": 2.0}, "q": {}, "r": {"b": 1.0}}
