"""`raytriever submit` to a cluster that asks for a token: who is let in, what comes back, what is never shown."""

import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.job_submission import JobSubmissionClient

from benchmarks.loopback_cluster import LoopbackCluster
from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.storage import Folder
from raytriever.cluster.submit import follow_job
from tests.unit.raytriever.test_cli import collect_of, write_collection
from tests.unit.small_run import make

HEAD = "127.0.0.77"  # loopback, and nobody else's


class TokenCluster(LoopbackCluster):
    """A head alone, whose environment has the keys of a store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [HEAD])
        self.address, self.token_file = f"http://{HEAD}:{self._dashboard}", folder / "token"
        self.log, self.temporary = self._log(HEAD), self._temporary(HEAD)
        self.secret = f"hush{secrets.token_hex(8)}"

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"AWS_SECRET_ACCESS_KEY": self.secret}

    def _start(self, address: str, options: Sequence[str], variables: dict[str, str] | None = None) -> None:
        super()._start(address, [option.replace("--num-cpus=0", "--num-cpus=1") for option in options], variables)

    def run(self, *arguments: str, token: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command of someone who has nothing to do with the Ray of the other tests."""
        command = [sys.executable, "-m", "raytriever", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
        environment |= {"RAY_API_SERVER_ADDRESS": self.address, "HOME": str(self.folder)} | variables
        if token:
            environment["RAY_AUTH_TOKEN_PATH"] = str(self.token_file)
        return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=self.folder)

    def wait_for_dashboard(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((HEAD, self._dashboard), timeout=1):
                return
            time.sleep(0.2)
        raise AssertionError("the dashboard never answered")


@pytest.fixture(scope="module")
def cluster(object_store: str) -> Iterator[TokenCluster]:  # noqa: ARG001
    if sys.platform != "linux":
        pytest.skip("a second loopback address is Linux's")
    short = tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp")  # as Ray's sockets need it
    with short as folder, TokenCluster(Path(folder)) as cluster:
        cluster.wait_for_dashboard()
        yield cluster


class ProcessList:
    """Whether a text was ever seen in the command line of any process of this machine."""

    def __init__(self, text: str) -> None:
        self._text, self.seen, self._over = text.encode(), False, threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> "ProcessList":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen |= self._text in path.read_bytes()
                except OSError:
                    continue


def test_without_the_token_nobody_is_let_in(cluster: TokenCluster, tmp_path: Path) -> None:
    command = collect_of(write_collection(tmp_path / "data"), str(tmp_path / "out"))
    for variables in ({}, {"RAY_AUTH_TOKEN": "0" * 64}):
        done = cluster.run("submit", "--", *command, token=False, **variables)
        assert done.returncode == 2
        assert "refuses this token, or no token is set" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.smoke
def test_a_job_gives_back_its_output_its_code_and_the_bytes_of_a_local_run(cluster: TokenCluster, tmp_path) -> None:
    data, output = write_collection(tmp_path / "data"), str(tmp_path / "out")
    done = cluster.run("submit", "--name", "first", "--", *collect_of(data, output))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "collect: 3 documents, 2 queries" in done.stdout
    assert "first: done" in done.stderr
    here = make(Collect(CollectConfig(source=BeirFolder(path=str(data)), output=str(tmp_path / "here"))))
    assert Artifact(output).fingerprint == Artifact(here).fingerprint


def test_settings_travel_with_a_job_and_its_name_is_its_own(cluster: TokenCluster, tmp_path: Path) -> None:
    data = write_collection(tmp_path / "data")
    settings = tmp_path / "collect.yaml"
    settings.write_text(f"source: {{kind: beir, path: {data}}}\noutput: runs/mine\n")
    failed = cluster.run("submit", "--name", "second", "--", "collect", str(settings))
    assert failed.returncode == 2
    assert "runs/mine is a relative path" in failed.stdout

    again = cluster.run("submit", "--name", "second", "--", "doctor")
    assert again.returncode == 2
    assert "Give another --name" in again.stderr


def test_secrets_of_the_nodes_reach_the_job_and_nothing_else(
    cluster: TokenCluster, object_store: str, tmp_path
) -> None:
    secret = cluster.secret
    command = collect_of(write_collection(tmp_path / "data"), f"{object_store}/submitted")
    with ProcessList(secret) as processes:
        done = cluster.run("submit", "--", *command)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert Artifact(f"{object_store}/submitted").rows == 3
    assert not processes.seen
    assert secret not in done.stdout + done.stderr
    logs = [path for path in cluster.temporary.rglob("*") if path.is_file() and "logs" in path.parts]
    assert len(logs) > 10
    assert [path for path in [cluster.log, *logs] if secret.encode() in path.read_bytes()] == []
    folder = Folder(f"{object_store}/submitted")
    written = {name: folder.read_bytes(name) for name in folder.files()}
    assert written.keys() >= {"manifest.json", "run.json"}
    assert [name for name, content in written.items() if secret.encode() in content] == []


def scraped(cluster: TokenCluster, run: str) -> dict[str, tuple[str, float]]:
    """What the nodes serve of ``run`` to a Prometheus without a token: stage and value by the metric's name."""
    listed = json.loads((cluster.temporary / "prom_metrics_service_discovery.json").read_text())
    found = {}
    for target in listed[0]["targets"]:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except OSError:  # Prometheus, too, tries again; the head's other processes have ports of all clusters here
            continue
        samples = [sample for family in families for sample in family.samples if sample.labels.get("run") == run]
        found |= {sample.name: (sample.labels["stage"], sample.value) for sample in samples}
    return found


def test_a_job_is_watched_by_its_metrics_and_by_its_log_as_json(cluster: TokenCluster, tmp_path: Path) -> None:
    output = tmp_path / "watched" / "corpus"
    command = collect_of(write_collection(tmp_path / "data"), str(output))
    (tmp_path / "env.yaml").write_text("env_vars: {RAYTRIEVER_LOG: json}\n")
    options = ["--name", "logged", "--runtime-env", str(tmp_path / "env.yaml")]
    done = cluster.run("submit", *options, "--", *command, RAYTRIEVER_LOG="json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said[0]["message"].startswith("Ray: joined the cluster")
    assert said[-1]["message"].startswith("collect: 3 documents, 2 queries")
    assert {(line["job"], line["run"], line["stage"]) for line in said} == {("logged", "watched", "corpus")}
    here = [json.loads(line)["message"] for line in done.stderr.splitlines() if line.startswith("{")]
    assert here[0].startswith("logged: 0.")  # so many MB are sent
    assert here[-1].startswith("logged: done")
    assert not re.search("^(logged|collect|Ray): ", done.stdout + done.stderr, re.MULTILINE)

    expected = {
        "ray_raytriever_shards_total": ("corpus", 3.0),  # what is read, compared and written
        "ray_raytriever_rows_total": ("corpus", float(Artifact(str(output)).rows)),
    }
    deadline = time.monotonic() + 60  # a process tells its node every ten seconds, and when it ends
    while scraped(cluster, "watched") != expected and time.monotonic() < deadline:
        time.sleep(1)
    assert scraped(cluster, "watched") == expected


def test_the_process_list_is_watched() -> None:
    with ProcessList("a-text-to-be-seen") as processes:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)", "a-text-to-be-seen"], check=True)
    assert processes.seen


def test_a_job_without_a_folder_refuses_a_relative_output_and_is_stopped_by_its_client(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.address)
    client = JobSubmissionClient(headers={"Authorization": f"Bearer {cluster.token_file.read_text()}"})
    command = shlex.join([sys.executable, "-m", "raytriever", *collect_of(tmp_path, "runs/mine")])
    client.submit_job(entrypoint=command, submission_id="without-folder")
    client.submit_job(entrypoint="sleep 300", submission_id="endless")
    assert follow_job(client, "without-folder") == 2
    assert "runs/mine is a relative path" in client.get_job_logs("without-folder")
    while client.get_job_status("endless") == "PENDING":
        time.sleep(0.2)
    client.stop_job("endless")
    assert follow_job(client, "endless") == 130
