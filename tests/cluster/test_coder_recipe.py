"""CODER's recipe on real data, with a tiny encoder and a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from retrieval.vectors import StoredVectors

pytest.importorskip("faiss", reason="FAISS is not installed")

ROOT = Path(__file__).parents[2]
DATA = os.environ.get("RAYTRIEVER_TEST_DATA", "")
pytestmark = pytest.mark.skipif(not DATA, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections")


@pytest.mark.slow
def test_the_papers_comparison_is_one_recipe(tmp_path: Path, tiny_encoder: Path) -> None:
    settings = {
        "corpus.source.path": f"{DATA}/nfcorpus_filtered",
        "other.source.path": f"{DATA}/cystic_fibrosis",
        "model.objective.query_max_length": "32",
        "train_run.top_k": "60",
        "batches.epochs": "1",
        "model.training.epochs": "1",
        "model.training.max_steps": "4",
        "model.training.schedule.warmup_steps": "1",
        "model.validation.every": "2",
    }
    for stage in ("vectors", "model", "other_vectors"):
        settings |= {f"{stage}.encoder.{key}": value for key, value in _ENCODER.items()}
        settings[f"{stage}.encoder.model"] = str(tiny_encoder)
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "raytriever", "run", "coder", *overrides, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<h2>Result</h2>" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    rows = BatchReader(str(tmp_path / "batches")).read(0, 0)
    ids = StoredVectors(str(tmp_path / "vectors")).part("documents").ids()
    for names, places in zip(rows["candidate_ids"].to_pylist(), rows["candidate_rows"].to_pylist(), strict=True):
        assert ids.take(places).to_pylist() == names
    steps = [json.loads(line) for line in (tmp_path / "model" / "training.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert all(step["unlabelled"] == 0 and 60 <= step["list_length"] < 160 for step in steps)
    assert "objective.documents" in Artifact(str(tmp_path / "model")).manifest["inputs"]
    base, queries = (StoredVectors(str(tmp_path / name)).contract for name in ("vectors", "query_vectors"))
    assert queries.document_model == base.fingerprint != queries.model
    evaluated = Artifact(str(tmp_path / "evaluation")).read_json("metrics.json")["means"]
    assert evaluated["CODER"] != evaluated["base"]
    assert len(evaluated) == 6


_ENCODER = {"pooling": "mean", "normalize": "true", "max_length": "32", "dtype": "float32"}
