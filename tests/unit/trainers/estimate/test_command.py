"""The command: what it says of a recipe, and of what it can't."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.small_run import make_collection

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


def test_it_says_what_stages_take(recipe: str) -> None:
    code, found = said(recipe, "--gpu", "a100", "--gpus", "2", "--set", "model.training.batches_per_step=2")
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert {"corpus", "pairs", "packing", "batches", "model", "vectors", "index", "all"} < lines.keys()
    assert "4,162 steps" in found  # 532,761 pairs in batches of 64, two a step
    assert "It fits: " in found
    assert lines["vectors"].split()[-2:] == ["785", "MB"]  # 8,841,823 documents and 502,939 queries, 32 numbers each


def test_a_collection_that_nobody_has_counted_yet_is_to_be_made_first(recipe: str, tmp_path: Path) -> None:
    made = make_collection(tmp_path / "data")
    source = f"corpus.source={{kind: beir, path: {tmp_path}/data/source}}"
    code, found = said(recipe, "--set", source)
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert all("?" in lines[name] for name in ("corpus", "pairs", "packing", "batches", "model", "index", "all"))
    assert found.endswith("Make it first:\n  raytriever run recipe.yaml --until corpus\n")
    shutil.copytree(made, "runs/recipe/corpus")
    code, found = said(recipe, "--set", source, "--set", "packing.packing.batch_size=8")
    assert code == 0
    assert "?" not in found
    assert " 6 steps." in found


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "h10"], r"--gpu h10: no such GPU is known. Did you mean 'h100'"),
        (["--gpu", "t4", "--set", "model.training.bf16=true"], "model: training.bf16 is on, and a t4 has no bfloat16"),
        (["--gpus", "3", "--set", "model.training.batches_per_step=2"], "can't be shared by 3 workers"),
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
            "model: A step of the 16 GPUs takes 16 batches (training.batches_per_step), and an epoch of"
            " runs/recipe/batches has 10: set training.batches_per_step to 8,",
        ),
        (["--set", "model.encoder.model=org/unknown"], "model: How the model 'org/unknown' is built isn't known here"),
        (["--set", "model.batches=runs/none"], "model: How large the batches in runs/none are isn't known"),
    ],
)
def test_what_it_cannot_say(recipe: str, arguments: list[str], problem: str) -> None:
    code, found = said(recipe, *arguments)
    assert code == 2
    assert problem in " ".join(found.split())
