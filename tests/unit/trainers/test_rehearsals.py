"""Rehearsals: the papers' recipes as they stand, every stage, on toys; a small one in this process."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.artifacts.artifact import Artifact
from raytriever.cli import app
from raytriever.settings.recipe import load_recipe, recipe_names
from tests.cluster.test_faults import TrainHere
from trainers.jobs.train import Train

pytest.importorskip("faiss", reason="FAISS is not installed")

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 600  # on two cores that others use too; by themselves three minutes
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = f"""
description: Every kind of stage that a paper's table needs.
output: runs/mine
resources: {{gpus_per_worker: 1}}
stages:
  corpus: {{job: collect, source: {{kind: dpr, path: /data/dpr, examples: {{train: nq-train.json}}}}}}
  pairs: {{job: pairs, collection: corpus}}
  packing: {{job: pack, pairs: pairs, packing: {{batch_size: 16, order: random}}, epochs: 40}}
  batches:
    job: filter
    packing: packing
    pairs: pairs
    collection: corpus
    judged_negatives: train
    false_negatives: {{surrogate_score: false}}
  model:
    job: train
    batches: batches
    resources: {{workers: 8}}
    encoder: {{model: sentence-transformers/all-MiniLM-L6-v2}}
    objective: {{kind: contrastive}}
    training: {{epochs: 40, batches_per_step: 8, bf16: false, schedule: {{warmup_steps: 100}}}}
suite:
  evaluate: {{measures: [nDCG@10]}}
  collections:
    nfcorpus: {{source: {{kind: mteb, path: hf://datasets/mteb/nfcorpus@{COMMIT}, splits: [test]}}}}
  systems:
    BM25: {{bm25: {{}}}}
    before: {{encoder: {{model: sentence-transformers/all-MiniLM-L6-v2}}}}
    after: {{encoder: {{model: model}}, index: {{factory: "IVF1024,Flat"}}}}
    both: {{fuse: {{systems: [BM25, after]}}}}
"""


@pytest.mark.usefixtures("one_thread")
def test_a_recipe_runs_as_it_stands_to_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Train, "execute", TrainHere.execute)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    done = CliRunner().invoke(app, ["rehearse", str(recipe), "--output", str(tmp_path / "toys")])
    assert done.exit_code == 0, (done.output[-3000:], done.exception)
    stages = load_recipe(str(recipe), []).stages
    made = tmp_path / "toys" / "runs" / "mine"
    assert all(Artifact(str(made / stage)).rows for stage in stages)
    assert Artifact(str(made / "model")).manifest["facts"]["steps"] == 2
    assert f"Rehearsed: {len(stages)} stages of mine" in done.stdout
    assert "What this doesn't show: That the hub has these models and data sets" in done.stdout
    for line in (
        "source.path: outside/_data_dpr (for /data/dpr) in corpus",
        "training.max_steps: 2 (for None) in model",
        "resources.workers: 2 (for 8) in model",
        "training.schedule.warmup_steps: 1 (for 100) in model",
        "index.factory: IVF8,Flat (for IVF1024,Flat) in nfcorpus/after/index",
        f"resources.gpus_per_worker: 0 (for 1.0) in {len(stages)} stages, such as corpus",
    ):
        assert line in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("papers/")])
def test_a_papers_recipe_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raytriever", "rehearse", name, "--output", str(tmp_path / "toys")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    assert f"stages of {name}" in done.stdout or f"and {name} ran through" in done.stdout
