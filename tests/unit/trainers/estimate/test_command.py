"""The command: what it says of a recipe, and of what it can't."""

import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.small_run import make_collection
from trainers.estimate.machines import find_gpus
from trainers.estimate.outlines import _outlines
from trainers.estimate.recipe import Estimating

RECIPE = """
stages:
  corpus:
    job: collect
    source:
      kind: trec
      path: data/msmarco
      documents: collection.tsv
      queries: queries.train.tsv
      qrels: {train: qrels.train.tsv}
  pairs: {job: pairs, collection: corpus}
  packing: {job: pack, pairs: pairs, packing: {batch_size: 64, order: random}}
  batches: {job: filter, packing: packing, pairs: pairs, collection: corpus, false_negatives: {surrogate_score: false}}
  model:
    job: train
    batches: batches
    encoder: {model: tiny, pooling: mean, normalize: true}
    objective: {kind: contrastive}
  vectors: {job: embed, collection: corpus, encoder: {model: model}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    save_tiny_model("bert", tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("tiny", str(tmp_path / "tiny")))
    monkeypatch.chdir(tmp_path)
    return "recipe.yaml"


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments])
    return result.exit_code, result.output


def test_it_says_what_stages_take(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _outlines()
    monkeypatch.setattr(tempfile, "tempdir", "tmp")
    Path("tmp").mkdir()
    code, found = said(recipe, "--gpu", "a100", "--gpus", "2", "--set", "model.training.batches_per_step=2")
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert {"corpus", "pairs", "packing", "batches", "model", "vectors", "index", "all"} < lines.keys()
    assert "4,162 steps" in found  # 532,761 pairs in batches of 64, two a step
    assert "It fits: " in found
    assert not list(Path("tmp").iterdir())  # the models' outlines go when the process ends
    code, of_t4 = said(recipe, "--gpu", "t4", "--gpus", "2")  # which has no bfloat16, that this processor may have
    assert code == 0
    assert "trained, bfloat16 autocast." in found
    assert "trained, float32." in of_t4
    assert lines["vectors"].split()[-2:] == ["785", "MB"]  # 8,841,823 documents and 502,939 queries, 32 numbers each


def test_a_collection_that_nobody_has_counted_yet_is_to_be_made_first(recipe: str, tmp_path: Path) -> None:
    made = make_collection(tmp_path / "data")
    source = f"corpus.source={{kind: beir, path: {tmp_path}/data/source}}"
    code, found = said(recipe, "--set", source)
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert all("?" in lines[name] for name in ("corpus", "pairs", "packing", "batches", "model", "index", "all"))
    assert found.endswith(f"Make it first:\n  raytriever run recipe.yaml '--set={source}' --until corpus\n")
    shutil.copytree(made, "runs/recipe/corpus")
    code, found = said(recipe, "--set", source, "--set", "packing.packing.batch_size=8")
    assert code == 0
    assert "?" not in found
    assert " 6 steps." in found
    shutil.copytree(tmp_path / "data/source", "others")
    Path("others/queries.jsonl").write_text('{"_id": "q0", "text": "another"}\n')
    Path("others/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    for other in (source.replace(f"{tmp_path}/data/source", "others"), source.replace("}", ", domain_key: x}")):
        code, found = said(recipe, "--set", other)
        assert "Not counted, because other settings or inputs made them: runs/recipe/corpus." in found
        assert f"raytriever run recipe.yaml '--set={other}' --until corpus\n" in found


RANKED = """
stages:
  corpus:
    job: collect
    source: {kind: trec, path: data/msmarco, documents: collection.tsv, queries: queries.tsv, qrels: {dev: qrels.tsv}}
  chunks: {job: chunk, collection: corpus, chunking: {max_words: 40}}
  words: {job: index, index: {kind: lexical, collection: corpus}}
  vectors: {job: embed, collection: corpus, encoder: {model: sentence-transformers/all-MiniLM-L6-v2}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
  by_words: {job: search, index: words, collection: corpus, split: dev, top_k: 1000}
  by_vectors: {job: search, index: index, collection: corpus, vectors: vectors, split: dev, top_k: 1000}
  fused: {job: fuse, runs: {words: by_words, vectors: by_vectors}}
  reranked: {job: rerank, run: fused, vectors: vectors, collection: corpus, depth: 100}
  lists: {job: mine, run: by_words, collection: corpus, split: dev, number: 7}
  evaluation:
    {job: evaluate, collection: corpus, split: dev, runs: {fused: fused, reranked: reranked, vectors: by_vectors}}
"""


def test_sizes_flow_from_stage_to_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranked.yaml").write_text(RANKED)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("ranked.yaml", [], None)
    estimating = Estimating(recipe_stages(recipe), find_gpus("h100", 8))
    for name in recipe.stages:
        estimating.add(name)
    made = {name: found.made for name, found in estimating.found.items()}
    documents, queries = 8_841_823, 55_578
    assert (made["corpus"].documents, made["corpus"].queries()) == (documents, queries)
    assert made["chunks"].documents == pytest.approx(1.75 * documents, rel=0.02)  # of 56 words, in four fifths of 40
    assert made["vectors"].dimension == 384
    assert made["index"].disk == 4 * 384 * documents
    assert made["index"].shards == 38  # a third of a GiB each
    assert made["words"].shards == 34
    assert made["by_words"].results == made["fused"].results == 1_000 * queries
    assert made["reranked"].disk == 52 * 100 * queries
    assert made["lists"].disk == 12 * 7 * queries
    seconds = {name: found.seconds for name, found in estimating.found.items()}
    assert seconds["by_vectors"] > 5 * seconds["by_words"] > 0
    assert seconds["evaluation"] == pytest.approx(0.36e-3 * 3 * queries, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "h10"], r"--gpu h10: no such GPU is known. Did you mean 'h100'"),
        (["--gpu", "mine"], "--gpu mine: no such GPU is known. Allowed: h100, h200, b200, a100, a100-40gb, l40s, l4,"),
        (["--gpu", "t4", "--set", "model.training.bf16=true"], "model: training.bf16 is on, and a t4 has no bfloat16"),
        (
            ["--gpus", "3", "--set", "model.training.batches_per_step=2"],
            "batches_per_step 2 and 3 ranks don't divide",
        ),
        (["--gpus", "128"], "can't be cut into 128 equal slices"),
        (
            [
                "--gpus",
                "16",
                "--set",
                "packing.packing.batch_size=51200",
                "--set",
                "model.training.batches_per_step=16",
            ],
            "model: Epoch 0 has 10 stored batches, fewer than the 16 of one step (batches_per_step).",
        ),
        (["--set", "model.encoder.model=org/unknown"], "model: The sizes of the model 'org/unknown' are unknown"),
        (["--set", "model.batches=runs/none"], "model: The size of the batches in runs/none is unknown"),
    ],
)
def test_what_it_cannot_say(recipe: str, arguments: list[str], problem: str) -> None:
    code, found = said(recipe, *arguments)
    assert code == 2
    assert problem in " ".join(found.split())
