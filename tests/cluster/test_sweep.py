"""`raytriever sweep` on Ray: shared stages, a second run, training."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.storage import Folder
from tests.unit.raytriever.sweep.test_sweep_command import LEXICAL, lexical_recipe, sweep
from tests.unit.raytriever.test_cli import write_collection

TRAINING = """
stages:
  collection: {job: collect, source: {kind: beir, path: PATH}}
  pairs: {job: pairs, collection: collection, split: train}
  packing: {job: pack, pairs: pairs, packing: {batch_size: 4, order: random}}
  batches: {job: filter, packing: packing, pairs: pairs, collection: collection,
            false_negatives: {surrogate_score: false}}
  model: {job: train, batches: batches, encoder: {model: ENCODER, pooling: mean},
          objective: {kind: contrastive, query_max_length: 16, document_max_length: 16},
          training: {max_steps: 2, bf16: false, optimizer: {learning_rate: 1.0e-3}}}
  vectors: {job: embed, collection: collection, encoder: {model: model, dtype: float32}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
  found: {job: search, index: index, collection: collection, vectors: vectors, top_k: 3}
  evaluation: {job: evaluate, collection: collection, runs: {trained: found}}
"""


def manifests(place: str) -> dict[str, str]:
    folder = Folder(place)
    names = [name for name in folder.files() if name.endswith("manifest.json")]
    return {name: hashlib.sha256(folder.read_bytes(name)).hexdigest() for name in names}


@pytest.mark.smoke
@pytest.mark.usefixtures("session")
def test_stages_are_shared_seeds_summarised_and_a_second_run_makes_nothing(tmp_path: Path) -> None:
    recipe, place = lexical_recipe(tmp_path), str(tmp_path / "out")
    done = sweep(recipe, *LEXICAL, "--output", place)
    assert done.exit_code == 0, (done.output, done.exception)
    made = manifests(place)
    once, by_k1 = {"collection", "pairs"}, {"k1=0.5/lexical", "k1=1/lexical"}
    trials = {f"k1={k1},top_k={k}/{name}" for k1 in ("0.5", "1") for k in "12" for name in ("found", "evaluation")}
    assert {name.removesuffix("/manifest.json") for name in made} == once | by_k1 | trials
    assert {json.loads(path.read_bytes())["recipe"] for path in Path(place).rglob("run.json")} == {"recipe.yaml"}
    assert "2 settings, 4 trials; measures of 'BM25'" in done.stdout
    assert "k1=0.5,top_k=2: evaluation: 1 run on 2 queries" in done.stderr
    stored = json.loads(Folder(place).read_bytes("sweep.json"))
    assert [trial["measures"][0]["value"] for trial in stored["trials"]] == [1.0] * 4
    assert [trial["values"]["found.top_k"] for trial in stored["trials"]] == ["1", "2", "1", "2"]

    again = sweep(recipe, *LEXICAL, "--output", place)
    assert again.exit_code == 0
    assert again.stderr.count(": reused") == 2 + 2 + 4
    assert "to make" not in again.stderr
    assert again.stdout == done.stdout
    assert manifests(place) == made


@pytest.mark.usefixtures("session")
def test_an_encoder_is_trained_for_each_value(tmp_path: Path, tiny_encoder: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    judgments = "a\t1\t1\nb\t2\t1\n"
    data = write_collection(tmp_path / "data", judgments=judgments)
    (data / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\na\t0\t1\na\t1\t1\na\t2\t1\nb\t1\t1\n")
    recipe = TRAINING.replace("PATH", "data").replace("ENCODER", os.path.relpath(tiny_encoder))
    Path("tiny.yaml").write_text(recipe)
    arguments = ("tiny.yaml", "--grid", "model.objective.similarity_temperature=0.05,1", "--output", "out")
    done = sweep(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    models = [Artifact(f"out/similarity_temperature={value}/model") for value in ("0.05", "1")]
    assert [model.config["objective"]["similarity_temperature"] for model in models] == [0.05, 1.0]
    assert models[0].fingerprint != models[1].fingerprint
    assert len({model.manifest["inputs"]["batches"] for model in models}) == 1
    trials = json.loads(Path("out/sweep.json").read_text())["trials"]
    assert all(trial["seconds"] > model.run_facts()["seconds"] for trial, model in zip(trials, models, strict=True))

    before = manifests("out")
    shutil.rmtree("out/similarity_temperature=1/evaluation")  # as if interrupted before it
    again = sweep(*arguments)
    assert again.exit_code == 0
    assert "similarity_temperature=0.05: reused" in again.stderr
    assert "similarity_temperature=1: model: reused" in again.stderr
    assert manifests("out") == before
