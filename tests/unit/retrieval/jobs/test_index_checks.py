"""What can't be indexed, searched or written to a run file is refused before work is spent on it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.jobs.collect import Collect
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages, run_recipe
from retrieval.jobs import index as index_job
from retrieval.jobs.embed import Embed
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from tests.unit.retrieval.made_up import beir_collection, stored_vectors, write_beir
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
    ones = np.ones((5, 2), dtype=np.float16)
    vectors = stored_vectors(tmp_path / "vectors", collection, {"documents": (ones, documents)})
    for settings in (LexicalIndexSettings(collection=collection), VectorIndexSettings(vectors=vectors)):
        with pytest.raises(UserError, match=r"A document id is 'my file\.py', which can't be written"):
            Index(IndexConfig(index=settings, output=str(tmp_path / "index"))).check_inputs({"index"})


def test_each_vector_of_a_document_counts_among_those_to_learn_from(tmp_path):
    documents = [f"d{number}" for number in range(10)]
    collection = collected(tmp_path, documents, ["q"], ["q"])
    two_each = np.ones((10, 2, 4), dtype=np.float16)
    vectors = stored_vectors(tmp_path / "vectors", collection, {"documents": (two_each, documents)})
    for lists, is_enough in ((16, True), (32, False)):
        index = VectorIndexSettings(vectors=vectors, factory=f"IVF{lists},Flat")
        job = Index(IndexConfig(index=index, output=str(tmp_path / "index")))
        with nullcontext() if is_enough else pytest.raises(UserError, match=r"at least 32 vectors, .* have 20"):
            job.check_inputs({"index.vectors"})


def test_a_budget_without_room_for_what_an_index_learns_from_is_named(tmp_path: Path) -> None:
    documents = [f"d{number}" for number in range(64)]
    collection = collected(tmp_path, documents, ["q"], ["q"])
    vectors = stored_vectors(tmp_path / "v", collection, {"documents": (np.ones((64, 4), dtype=np.float16), documents)})
    for budget, is_enough in ((1536, True), (1535, False)):  # three times 32 vectors of 16 bytes
        index = VectorIndexSettings.model_construct(
            vectors=vectors, factory="IVF32,Flat", memory_budget=budget, training_sample=99, seed=0
        )
        job = Index(IndexConfig.model_construct(index=index, output=str(tmp_path / "index")))
        with nullcontext() if is_enough else pytest.raises(UserError, match=r"at least 32 vectors, and index.memory_b"):
            job.check_inputs({"index.vectors"})


def test_graphs_over_repeated_vectors_are_refused(tmp_path: Path) -> None:
    documents = ["a", "b"]
    collection = collected(tmp_path, documents, ["q"], ["q"])
    two_each = {"documents": (np.ones((2, 2, 4), dtype=np.float16), documents)}
    for form, factory, is_right in (
        ("all tokens", "HNSW8,Flat", False), ("all tokens", "OPQ2,HNSW8_PQ2x4", False), ("all tokens", "Flat", True),
        ("all tokens", "IVF1_HNSW8,Flat", True), ("layers 1, 2", "HNSW8,Flat", True),
    ):  # fmt: skip
        vectors = stored_vectors(tmp_path / f"{form} {factory}", collection, two_each, form=form)
        index = VectorIndexSettings(vectors=vectors, factory=factory)
        job = Index(IndexConfig(index=index, output=str(tmp_path / "index")))
        with nullcontext() if is_right else pytest.raises(UserError, match="a graph, and short documents of"):
            job.check_inputs({"index.vectors"})


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


RECIPE = """
stages:
  corpus: {job: collect, source: {kind: beir, path: SOURCE}}
  vectors: {job: embed, collection: corpus, encoder: {model: MODEL, dtype: float32, pooling: mean}}
  index: {job: index, index: {kind: vectors, vectors: vectors, factory: "OPQ8,IVF4,PQ8x4"}}
  ranking: {job: search, index: index, collection: corpus, vectors: vectors, search_parameters: nprobe=8}
"""


class Embedded(Exception):
    """The run has come to the embedding."""


@pytest.fixture
def run(tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the recipe on so many documents until the first of them would be embedded."""

    def embed(*_: Any) -> None:
        raise Embedded

    def collect(stage: Collect, pending: Any, *_: Any) -> Any:
        return map(stage.make_shard, pending)

    monkeypatch.setattr(Collect, "execute", collect)
    monkeypatch.setattr(Embed, "execute", embed)
    text = RECIPE.replace("SOURCE", str(tmp_path / "source")).replace("MODEL", str(tiny_encoder))
    (tmp_path / "recipe.yaml").write_text(text)

    def run(documents: int, *overrides: str) -> None:
        corpus = ({"_id": f"d{row}", "title": "", "text": "x"} for row in range(documents))
        write_beir(tmp_path / "source", corpus, [{"_id": "q", "text": "y"}], [("q", "d0", 1)])
        stages = recipe_stages(load_recipe(str(tmp_path / "recipe.yaml"), overrides, str(tmp_path / "out")))
        run_recipe(stages, list(stages), "recipe", str(tmp_path))

    return run


def test_too_few_documents_are_found_when_they_are_embedded(run, tmp_path, monkeypatch):
    def embed(stage: Embed, pending: Any, *_: Any) -> Any:
        stage.load()
        return map(stage.make_shard, pending)

    monkeypatch.setattr(Embed, "execute", embed)
    said = r"index: index\.factory is 'OPQ8,IVF4,PQ8x4', .* at least 256 vectors, but .* of .*/vectors have 60"
    for _ in range(2):  # made, and reused
        with pytest.raises(UserError, match=said):
            run(60)
        assert (tmp_path / "out" / "vectors" / "manifest.json").exists()


def test_parameters_that_the_factory_lacks_are_found_before_the_run(run: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ranking: .* 'nprobe=8' don't fit this index \(null fits any\)"):
        run(60, "index.index.factory=Flat")
    with pytest.raises(UserError, match=r"index\.training_sample is 9, but .* at least 256 vectors\. Raise it"):
        run(300, "index.index.training_sample=9")
    assert not (tmp_path / "out" / "vectors").exists()


@pytest.mark.parametrize("stage", ["index", "ranking"])
def test_a_graph_for_a_gpu_is_refused_before_anything_is_made(run: Any, tmp_path: Path, stage: str) -> None:
    factory, gpu = "index.index.factory=OPQ8,HNSW8_PQ8x4", f"{stage}.resources.gpus_per_worker=1"
    with pytest.raises(UserError, match=r"HNSW8_PQ8x4' is a graph .HNSW.*resources\.gpus_per_worker of that"):
        run(300, factory, gpu, "ranking.search_parameters=efSearch=64")
    assert not (tmp_path / "out" / "corpus").exists()
    with pytest.raises(Embedded):
        run(300, factory, "ranking.search_parameters=efSearch=64")
    with pytest.raises(Embedded):
        run(300, gpu)
