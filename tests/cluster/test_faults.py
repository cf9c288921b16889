"""A cluster of a head and two nodes that loses workers, nodes and the driver: the same bytes, and little made twice.

Killed workers of one machine are in test_stages.py and test_cluster_job.py, a killed local run in
test_interrupted_run.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch
from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc

from benchmarks.loopback_cluster import ROOT, LoopbackCluster, kill
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.storage import Folder
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from tests.cluster import stored_bytes
from tests.cluster.journaled import KINDS, JournaledConfig, notes
from tests.unit.small_run import make, make_run
from trainers.jobs.train import Train, TrainConfig
from trainers.record.run_log import RunLog, read_curve
from trainers.training_run import run_training, write_model

pytestmark = pytest.mark.slow  # three nodes of its own, a minute and a half

Seen = TypeVar("Seen")
HEAD, FIRST, SECOND = "127.0.0.81", "127.0.0.82", "127.0.0.83"  # loopback, and nobody else's


@pytest.fixture(scope="module")
def cluster() -> Iterator[LoopbackCluster]:
    if sys.platform != "linux":
        pytest.skip("a second loopback address is Linux's")
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # Ray's sockets need a short path
    try:
        with LoopbackCluster(folder, [HEAD, FIRST, SECOND]) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Command:
    """A command on the cluster, killed with the test at the latest."""

    def __init__(self, cluster: LoopbackCluster, folder: Path, *arguments: str) -> None:
        self._log = folder / "log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], env=cluster.environment, stdout=log, stderr=log, cwd=ROOT
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for(self, what: Callable[[], Seen | None]) -> Seen:
        """What ``what`` returns once that is true, which it must be while the command runs."""
        deadline = time.monotonic() + 120
        while not (found := what()):
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        return found

    def kill(self) -> None:
        kill(self._process.pid)
        self._process.wait()

    def succeed(self) -> None:
        assert self._process.wait(180) == 0, self.log

    @property
    def log(self) -> str:
        return self._log.read_text()


def begun(journal: Path) -> int:
    return sum(note.what == "begun" for note in notes(journal))


def finished(journal: Path) -> int:
    return sum(note.what == "finished" for note in notes(journal))


def assert_undisturbed(output: Path, kind: str) -> int:
    """The bytes are those of a stage that nothing has disturbed; its number of shards."""
    config = JournaledConfig(output=f"{output}-undisturbed", journal=f"{output}-other", seconds=0)
    assert hashes(output) == hashes(Path(make(KINDS[kind](config))))
    return config.shards


@pytest.mark.parametrize("kind", ["tasks", "actors"])
def test_of_shards_only_those_being_made_are_lost(cluster: LoopbackCluster, tmp_path: Path, kind: str) -> None:
    output, journal = tmp_path / "out", tmp_path / "journal"

    def busy() -> list[int]:
        """The processes that are making a shard."""
        last = {note.process: note.what for note in notes(journal)}
        return [process for process in cluster.workers() if last.get(process) == "begun"]

    def caught() -> int | None:
        """One of them, stopped in the midst: it cannot finish while it is being looked at."""
        for process in busy():
            os.kill(process, signal.SIGSTOP)
            if process in busy():
                return process
            os.kill(process, signal.SIGCONT)
        return None

    program = ("-m", "tests.cluster.journaled", kind, str(output), str(journal))
    with Command(cluster, tmp_path, *program) as command:
        kill(command.wait_for(lambda: caught() if finished(journal) >= 3 else None))
        node = cluster.node_of(command.wait_for(lambda: caught() if finished(journal) >= 8 else None))
        cluster.kill_node(node)
        cluster.start_node(node)
        command.wait_for(lambda: finished(journal) >= 14 and busy())
        command.kill()
    kept = {path: path.stat().st_mtime_ns for path in (output / "shards").iterdir()}
    assert len(kept) >= 14
    with Command(cluster, tmp_path, *program) as command:
        command.succeed()
    cluster.wait_for(node)

    shards = assert_undisturbed(output, kind)
    made = list(notes(journal))
    assert finished(journal) == shards, made
    assert 2 <= begun(journal) - shards <= 4, made  # the worker's, the node's, and of the driver's at most two


def test_after_the_loss_of_the_head_the_command_given_again_goes_on(cluster: LoopbackCluster, tmp_path: Path) -> None:
    output, journal = tmp_path / "out", tmp_path / "journal"
    program = ("-m", "tests.cluster.journaled", "tasks", str(output), str(journal))
    with Command(cluster, tmp_path, *program) as command:
        command.wait_for(lambda: finished(journal) >= 4)
        cluster.stop()  # nodes don't outlive their head, nor does a driver that runs on it
    kept = list((output / "shards").iterdir())
    assert kept
    cluster.start()
    with Command(cluster, tmp_path, *program) as command:
        command.succeed()
    shards = assert_undisturbed(output, "tasks")
    made = list(notes(journal))
    assert shards <= finished(journal) <= shards + 2, made
    assert begun(journal) <= 2 * shards - len(kept), made


def test_a_client_needs_the_token(cluster: LoopbackCluster) -> None:
    ping = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)

    def ask(token: str | None) -> None:
        metadata = [("client_id", "someone")] + ([("authorization", f"Bearer {token}")] if token else [])
        with grpc.insecure_channel(cluster.client.removeprefix("ray://")) as channel:
            ray_client_pb2_grpc.RayletDriverStub(channel).ClusterInfo(ping, timeout=60, metadata=metadata)

    ask((cluster.folder / "token").read_text())
    for strange in (None, "f" * 64):
        with pytest.raises(grpc.RpcError) as refused:
            ask(strange)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


class TrainHere(Train):
    """The same run in this process."""

    def execute(self, pending, session, progress):  # noqa: ARG002
        for _ in pending:
            config, cpu = self.config, torch.device("cpu")
            with RunLog(Folder(config.output), cpu) as run_log:
                objective, trained = run_training(config, config.located(), config.output, cpu, [run_log])
            yield write_model(config, self.derivation(), objective, trained, run_log)


def trained_undisturbed(folder: Path, encoder: Path, batches_per_step: int = 1, **settings: Any) -> tuple[Path, Path]:
    """The folder of a training in this process, and that of the same one by ``train.yaml``, which is not begun."""
    settings |= {
        "batches": make_run(folder / "run")["batches"],
        "encoder": {"model": str(encoder), "pooling": "mean"},
        "objective": {"kind": "contrastive"},
        "training": {"bf16": False, "epochs": 2, "batches_per_step": batches_per_step, "checkpoint_every": 2,
                     "optimizer": {"learning_rate": 1e-3}},
    }  # fmt: skip
    undisturbed, output = folder / "undisturbed", folder / "out"
    run_stage(TrainHere(TrainConfig.model_validate(settings | {"output": str(undisturbed)})), RaySession())
    (folder / "train.yaml").write_text(json.dumps(settings | {"output": str(output)}))
    return undisturbed, output


@pytest.mark.usefixtures("one_thread")
def test_training_goes_on_from_a_checkpoint(cluster: LoopbackCluster, tmp_path: Path, tiny_encoder: Path) -> None:
    undisturbed, output = trained_undisturbed(tmp_path, tiny_encoder)
    written: set[tuple[str, int]] = set()  # every checkpoint with its time

    def reached(steps: int) -> bool:
        for record in output.glob("checkpoints/step-*/checkpoint.json"):
            with suppress(FileNotFoundError):  # pruned meanwhile
                written.add((record.parent.name, record.stat().st_mtime_ns))
        return f"step-{steps:08d}" in {name for name, _ in written}

    def worker() -> int:
        return next(process for process, title in cluster.workers().items() if "train_alone" in title)

    program = ("-m", "raytriever", "train", str(tmp_path / "train.yaml"))
    with Command(cluster, tmp_path, *program) as command:
        command.wait_for(lambda: reached(6))
        node = cluster.node_of(worker())
        cluster.kill_node(node)
        cluster.start_node(node)
        command.wait_for(lambda: reached(14))
        command.kill()
    with Command(cluster, tmp_path, *program) as command:
        command.wait_for(lambda: reached(24))
        command.succeed()
    cluster.wait_for(node)
    assert hashes(output) == hashes(undisturbed)
    assert len({name for name, _ in written}) == len(written), sorted(written)  # no step before a checkpoint twice


@pytest.mark.usefixtures("one_thread")
def test_elastic_training_goes_on_with_the_worker_that_is_left(
    cluster: LoopbackCluster, tmp_path: Path, tiny_encoder: Path
) -> None:
    elastic = {"resources": {"workers": 2, "cpus_per_worker": 1}, "fewest_workers": 1}
    undisturbed, output = trained_undisturbed(tmp_path, tiny_encoder, batches_per_step=2, **elastic)

    def trainers() -> list[int]:
        return [process for process, title in cluster.workers().items() if "RayTrainWorker" in title]

    most = 0
    with Command(cluster, tmp_path, "-m", "raytriever", "train", str(tmp_path / "train.yaml")) as command:

        def reached() -> bool:
            nonlocal most
            most = max(most, len(trainers()))
            return any(output.glob("checkpoints/step-00000004/checkpoint.json"))

        command.wait_for(reached)
        lost = cluster.node_of(trainers()[-1])
        cluster.kill_node(lost)
        command.succeed()
    cluster.start_node(lost)
    cluster.wait_for(lost)
    assert most == 2
    mine, theirs = (read_curve(Folder(str(folder))) for folder in (output, undisturbed))
    assert [point["step"] for point in mine] == [point["step"] for point in theirs]
    assert [point["loss"] for point in mine] == pytest.approx([point["loss"] for point in theirs], rel=1e-4)


def hashes(folder: Path) -> dict[str, str]:
    Artifact(str(folder)).verify()
    return stored_bytes.hashes(folder)
