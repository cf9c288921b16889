"""A transformer's quickstart to its model, small, with a tiny encoder: killed, against the same in one process."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytriever.settings.recipe import load_recipe
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import recipe_stages, run_stage
from tests.cluster.stored_bytes import hashes
from tests.cluster.test_faults import TrainHere
from tests.unit.raytriever.test_cli import options
from trainers.jobs.train import Train

pytestmark = pytest.mark.slow  # three runs to the model; killed workers and stages that go on: test_stages.py

SMALL = {
    "functions.source.limit": "500",
    "clusters.cluster_size": "16",
    "clusters.smallest_domain": "16",
    "base_vectors.texts_per_shard": "100",
    "base_vectors.encoder.dtype": "float32",
    "base_vectors.encoder.pooling": "mean",
    "model.encoder.pooling": "mean",
    "model.objective.document_max_length": "64",  # all that the tiny encoder reads
    "model.training.bf16": "false",
    "model.resources.cpus_per_worker": "1",  # as many threads as the process of the tests has
    "model.training.checkpoint_every": "1",
    "model.training.max_steps": "20",
    "model.training.optimizer.learning_rate": "1e-3",
}


def settings_of(encoder: Path) -> dict[str, str]:
    return SMALL | {"base_vectors.encoder.model": str(encoder), "model.encoder.model": str(encoder)}


def command(encoder: Path, output: Path) -> list[str]:
    program = [sys.executable, "-m", "raytriever", "run", "quickstart_transformer"]
    return [*program, "--until=model", f"--output={output}", *options(settings_of(encoder))]


def run(encoder: Path, output: Path) -> str:
    done = subprocess.run(command(encoder, output), capture_output=True, text=True, timeout=400, cwd=output.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run_until_killed(encoder: Path, output: Path, appears: str) -> None:
    """Starts the run and SIGKILLs all its processes as soon as a file that matches ``appears`` is there."""
    process = subprocess.Popen(
        command(encoder, output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=output.parent
    )
    deadline = time.monotonic() + 300
    while not any(output.glob(appears)):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, f"{appears} never appeared"
        time.sleep(0.01)
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    process.stderr.close()


@pytest.fixture(scope="module")
def killed(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed among the steps of training, and went on to its end; of shards: test_stages.py."""
    output = tmp_path_factory.mktemp("killed") / "run"
    run_until_killed(tiny_encoder, output, "model/checkpoints/*/checkpoint.json")  # the first of twenty
    log = run(tiny_encoder, output)
    assert log.count(": reused") == 6  # what is before the model
    assert "resumes from the checkpoint after" in log
    return output


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_goes_on_to_the_same_bytes(
    tiny_encoder: Path, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Train, "execute", TrainHere.execute)
    settings = [f"{key}={value}" for key, value in settings_of(tiny_encoder).items()]
    undisturbed = load_recipe("quickstart_transformer", settings, str(tmp_path / "run"))
    stages = recipe_stages(undisturbed)
    for name in undisturbed.names_until("model"):
        run_stage(stages[name], RaySession(shards_here=True), recipe="quickstart_transformer")
    assert hashes(tmp_path / "run") == hashes(killed)


def test_a_second_run_reuses_everything_without_ray(tiny_encoder: Path, killed: Path) -> None:
    before = hashes(killed)
    log = run(tiny_encoder, killed)
    assert log.count(": reused, ") == 7
    assert "Ray:" not in log
    assert hashes(killed) == before


def test_what_comes_out_is_a_retriever(killed: Path) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(killed / "model"), device="cpu").encode(["Return the sum of a and b."])
    assert vectors.shape == (1, 32)
