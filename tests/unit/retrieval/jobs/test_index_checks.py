"""An index that can't be built or searched as asked is refused before it is begun."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.collect import Collect
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages, run_recipe
from retrieval.jobs.embed import Embed

pytest.importorskip("faiss", reason="FAISS is not installed")

RECIPE = """
stages:
  corpus: {job: collect, source: {kind: beir, path: SOURCE}}
  vectors: {job: embed, collection: corpus, encoder: {model: MODEL, dtype: float32}}
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
    source = tmp_path / "source"
    (source / "qrels").mkdir(parents=True)
    (source / "queries.jsonl").write_text('{"_id": "q", "text": "y"}')
    (source / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td0\t1\n")
    text = RECIPE.replace("SOURCE", str(source)).replace("MODEL", str(tiny_encoder))
    (tmp_path / "recipe.yaml").write_text(text)

    def run(documents: int, *overrides: str) -> None:
        lines = (json.dumps({"_id": f"d{row}", "title": "", "text": "x"}) for row in range(documents))
        (source / "corpus.jsonl").write_text("\n".join(lines))
        stages = recipe_stages(load_recipe(str(tmp_path / "recipe.yaml"), overrides, str(tmp_path / "out")))
        run_recipe(stages, list(stages), "recipe")

    return run


def test_too_few_documents_are_found_when_they_are_embedded(run, tmp_path, monkeypatch):
    def embed(stage: Embed, pending: Any, *_: Any) -> Any:
        stage.load()
        return map(stage.make_shard, pending)

    monkeypatch.setattr(Embed, "execute", embed)
    said = (
        r"index: index\.factory is 'OPQ8,IVF4,PQ8x4', .* at least 256 vectors, and the documents of .*/vectors have 60"
    )
    for _ in range(2):  # made, and reused
        with pytest.raises(UserError, match=said):
            run(60, "vectors.encoder.pooling=mean")
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
