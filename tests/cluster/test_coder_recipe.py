"""CODER's recipe on real data, with a tiny encoder and a few steps."""

import json
from pathlib import Path

import pytest

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from retrieval.vectors import StoredVectors
from tests.cluster.real_data import DATA, needs_data, run_recipe

pytestmark = needs_data


@pytest.mark.slow
def test_the_papers_comparison_is_one_recipe(tmp_path: Path, tiny_encoder: Path) -> None:
    settings: dict[str, object] = {
        "corpus.source.path": f"{DATA}/nfcorpus_filtered", "other.source.path": f"{DATA}/cystic_fibrosis",
        "model.objective.query_max_length": 32, "train_run.top_k": 60, "batches.epochs": 1, "model.training.epochs": 1,
        "model.training.max_steps": 4, "model.training.schedule.warmup_steps": 1, "model.validation.every": 2,
    }  # fmt: skip
    encoder = {"model": tiny_encoder, "pooling": "mean", "normalize": "true", "max_length": 32, "dtype": "float32"}
    for stage in ("vectors", "model", "other_vectors"):
        settings |= {f"{stage}.encoder.{key}": value for key, value in encoder.items()}
    run_recipe("coder", settings, tmp_path)
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
