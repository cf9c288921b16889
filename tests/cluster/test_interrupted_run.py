"""The quickstart, small and with a tiny encoder: killed at several moments, against an undisturbed run."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytriever.artifacts.artifact import TIMES

ROOT = Path(__file__).parents[2]
NO_PART_OF_ARTIFACTS = (*TIMES, "report.html")
SMALL = {
    "functions.source.limit": "500",
    "clusters.cluster_size": "16",
    "clusters.smallest_domain": "16",
    "packing.packing.batch_size": "16",
    "base_vectors.texts_per_shard": "100",
    "base_vectors.encoder.dtype": "float32",
    "model_vectors.encoder.dtype": "float32",
    "base_vectors.encoder.pooling": "mean",
    "model.encoder.pooling": "mean",
    "model.objective.document_max_length": "64",  # all that the tiny encoder reads
    "model.training.bf16": "false",
    "model.training.checkpoint_every": "4",
    "model.training.max_steps": "12",
    "model.training.schedule.warmup_steps": "2",
    "model.training.optimizer.learning_rate": "1e-3",
}


def command(encoder: Path, output: Path, *more: str) -> list[str]:
    settings = SMALL | {"base_vectors.encoder.model": str(encoder), "model.encoder.model": str(encoder)}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [
        sys.executable,
        "-m",
        "raytriever",
        "run",
        "quickstart",
        "--output",
        str(output),
        *overrides,
        *more,
    ]


def run(encoder: Path, output: Path, *more: str) -> str:
    done = subprocess.run(
        command(encoder, output, *more), capture_output=True, text=True, timeout=400, cwd=output.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run_until_killed(encoder: Path, output: Path, appears: str) -> None:
    """Starts the run and SIGKILLs it as soon as a file that matches ``appears`` is there."""
    process = subprocess.Popen(
        command(encoder, output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=output.parent
    )
    deadline = time.monotonic() + 300
    while not any(output.glob(appears)):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, f"{appears} never appeared"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def hashes(output: Path) -> dict[str, str]:
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in NO_PART_OF_ARTIFACTS and path.parent != output / "report"
    }


@pytest.fixture(scope="module")
def undisturbed(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    log = run(tiny_encoder, output)
    assert "trained encoder" in log
    return output


def test_a_killed_run_goes_on_to_the_same_bytes(tiny_encoder: Path, undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(undisturbed / "functions", output / "functions")  # whose making no kill is to meet
    run_until_killed(tiny_encoder, output, "base_vectors/shards/documents-*.json")
    run_until_killed(tiny_encoder, output, "model/checkpoints/step-00000008/checkpoint.json")
    log = run(tiny_encoder, output, "--until", "model")
    assert "base_vectors: reused" in log
    assert "model: reused" not in log
    made = {folder.name for folder in output.iterdir()}
    assert {"base_vectors", "batches", "model"} <= made
    assert hashes(output) == {
        name: digest for name, digest in hashes(undisturbed).items() if name.split("/")[0] in made
    }


def test_a_second_run_reuses_everything_without_ray(tiny_encoder: Path, undisturbed: Path) -> None:
    before = hashes(undisturbed)
    log = run(tiny_encoder, undisturbed)
    assert log.count(": reused, ") == 17
    assert "Ray:" not in log
    assert hashes(undisturbed) == before


def test_what_comes_out_is_a_retriever(undisturbed: Path) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(undisturbed / "model"), device="cpu").encode(["Return the sum of a and b."])
    assert vectors.shape == (1, 32)
    lines = (undisturbed / "model_run" / "run.trec").read_text().splitlines()
    assert {len(line.split(" ")) for line in lines} == {6}
    assert (undisturbed / "report" / "report.html").exists()
