"""A mistake that one of two training workers comes upon ends the run, with the message, and isn't tried again."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.batches import BatchReader, epoch_permutation
from raytriever.cli import app
from tests.unit.trainers.triplet_batches import store_triplets


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_a_batch_that_the_second_worker_refuses(tmp_path: Path, tiny_encoder: Path) -> None:
    second = int(epoch_permutation(0, 1, 4)[1])  # of the first step of the second epoch, the second worker's batch
    settings = {
        "output": str(tmp_path / "model"),
        "batches": store_triplets(tmp_path / "batches", doubled={(1, second)}),
        "resources": {"workers": 2, "cpus_per_worker": 1},
        "encoder": {"model": str(tiny_encoder), "pooling": "mean"},
        "objective": {"kind": "adaptive_margin"},
        "training": {"bf16": False, "epochs": 2, "batches_per_step": 2},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(settings))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "train.yaml")])
    assert done.exit_code == 2, (done.output, done.exception)
    *before, last = done.stderr.splitlines()
    query = BatchReader(f"{tmp_path}/batches").read(1, second)["query"][0].as_py()
    assert last.startswith(f"raytriever: Batch {second} of epoch 1 in {tmp_path}/batches: Query {query[:60]!r} has 2 ")
    assert "has 2 hard negatives; a triplet has exactly one" in last
    assert not any("triplet" in line for line in before)
    assert before.count("  ledger:") == 1  # which every attempt says
