"""`raytriever sweep` as a user types it: shared stages, failures, a second run."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.artifacts.storage import Folder
from raytriever.cli import app
from tests.cluster.test_command import RECIPE, refused, write_collection

LEXICAL = ("--grid", "lexical.index.bm25.k1=0.5,1", "--seeds", "found.top_k=1,2")
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


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def lexical_recipe(folder: Path) -> str:
    data = write_collection(folder / "data")
    (folder / "recipe.yaml").write_text(RECIPE.replace("PATH", str(data)))
    return str(folder / "recipe.yaml")


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
    assert {json.loads(path.read_bytes())["recipe"] for path in Path(place).rglob("run.json")} == {"recipe"}
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
def test_a_trial_that_fails_is_shown_and_the_others_go_on(tmp_path: Path, object_store: str) -> None:
    recipe, output = lexical_recipe(tmp_path), f"{object_store}/sweep"
    arguments = (recipe, "--grid", "found.split=absent,test", "--output", output)
    done = sweep(*arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert is_artifact(f"{output}/split=test/evaluation")
    assert not is_artifact(f"{output}/split=absent/found")
    assert "split=absent failed:" in done.stdout
    assert "Splits there: test." in done.stdout
    assert "1.0000" in done.stdout
    stored = json.loads(Folder(output).read_bytes("sweep.json"))
    assert "absent" in stored["trials"][0]["error"]
    assert stored["trials"][1]["error"] is None

    again = sweep(*arguments)  # what failed is tried again, what is finished is not
    assert again.exit_code == 1
    assert "1 setting of found, evaluation to make" in again.stderr
    assert "split=test: reused" in again.stderr


@pytest.mark.usefixtures("session", "json_log")
def test_what_needs_a_failed_stage_fails_with_it(tmp_path: Path) -> None:
    recipe, output = lexical_recipe(tmp_path), str(tmp_path / "out")
    done = sweep(recipe, "--grid", "found.split=absent,test", "--grid", "evaluation.seed=1,2", "--output", output)
    assert done.exit_code == 1
    trials = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
    assert [trial["error"] is None for trial in trials] == [False, False, True, True]
    assert trials[0]["error"] == trials[1]["error"]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    where = {(line["run"], line["stage"]) for line in lines if line["message"].startswith("split=test")}
    assert where == {("split=test", "found"), ("split=test,seed=1", "evaluation"), ("split=test,seed=2", "evaluation")}


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


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--grid", "lexcial.index.bm25.k1=1"], "Did you mean 'lexical'?"),
    (["--grid", "lexical.index.bm25.k=1,2"], "'index.bm25.k' is not a setting"),
    (["--grid", "lexical.index.bm25.k1=1,many"], "given: 'many'"),
    (["--grid", "found.top_k=1", "--seeds", "found.top_k=2"], "swept twice"),
    (["--grid", "found.top_k=1", "--set", "found.top_k=2"], "swept and set"),
    (["--grid", "found.top_k=1", "--system", "BM52"], "Did you mean 'BM25'?"),
    (["--grid", "found.top_k=1", "--measure", "nDCG@100"], "Did you mean 'nDCG@10'?"),
    (["--grid", "found.top_k=1", "--until", "found"], "no stage with job: evaluate"),
    (["--grid", "found.top_k=1:3"], "given: '1:3'"),
    ([], "needs a --grid"),
])  # fmt: skip
def test_a_mistake_stops_the_sweep_before_anything_is_made(tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused("sweep", lexical_recipe(tmp_path), *arguments, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_would_be_made_can_be_seen_before(tmp_path: Path) -> None:
    arguments = (lexical_recipe(tmp_path), *LEXICAL, "--output", str(tmp_path / "out"))
    shown = sweep(*arguments, "--print-config")
    assert (shown.exit_code, "k1=0.5,top_k=2:" in shown.stdout) == (0, True)
    assert not (tmp_path / "out").exists()
