"""`raytriever doctor`: on a Ray that runs, and every finding on made-up facts."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytriever.artifacts.storage import Folder
from raytriever.cli import app
from raytriever.cluster import doctor
from raytriever.cluster import doctor as node_facts
from raytriever.cluster.checks import (
    Check,
    Cluster,
    Node,
    NodeFacts,
    check_cluster,
    delete_probe,
    read_probes,
    write_probe,
)
from raytriever.cluster.doctor import _clock_difference, examine, report

FACTS = NodeFacts(
    versions={"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0"},
    gpus=("A100", "A100"),
    driver="550.1",
    libraries={"torch CUDA": "12.8", "torch GPUs": 2, "FAISS GPUs": 2},
    disk={"session": (90 * 10**9, 100 * 10**9), "cache": (50 * 10**9, 100 * 10**9)},
    shared_memory=10**10,
    token_file_readable_by_others=None,
    authentication=True,
    s3_endpoint=None,
)
FINE = Node("10.0.0.1", gpus=2, object_store=1e9, facts=FACTS)


def checked(*nodes: Node, **changes: Any) -> dict[str, Check]:
    cluster = Cluster(nodes, True, False, "10.0.0.1:8265", "s3://bucket")
    return {check.name: check for check in check_cluster(replace(cluster, **changes))}


def with_facts(**changes: Any) -> Node:
    return replace(FINE, address="10.0.0.2", facts=replace(FACTS, **changes))


def test_a_sound_cluster_passes() -> None:
    checks = checked(FINE, replace(FINE, address="10.0.0.2"))
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["GPUs"].found == "4: A100"


@pytest.mark.parametrize(
    ("node", "name", "expected"),
    [
        (with_facts(versions=FACTS.versions | {"torch": "2.12.0"}), "versions", "torch 2.12.0 on 1, 2.13.0 on 1"),
        (with_facts(versions={"Python": "3.11.7", "ray": "2.60.0"}), "versions", "torch 2.13.0 on 1"),
        (with_facts(gpus=("A100",) * 3), "GPUs", "10.0.0.2: the driver lists 3, torch 2.13.0 sees 2"),
        (with_facts(libraries=FACTS.libraries | {"torch CUDA": "12.6"}), "CUDA", "12.6 on 10.0.0.2, 12.8 on 10.0.0.1"),
        (replace(FINE, gpus=8), "GPUs", "Ray hands out 8, torch sees 2"),
        (with_facts(libraries={"error": "libcudart is missing"}), "libraries", "libcudart is missing"),
        (with_facts(libraries=FACTS.libraries | {"FAISS GPUs": 1}), "libraries", "FAISS sees 1 of 2 GPUs"),
        (with_facts(disk=FACTS.disk | {"cache": (10**9, 10**12)}), "disk", "1.0 of 1000 GB free for the cache"),
        (with_facts(disk=FACTS.disk | {"session": (40 * 10**9, 10**12)}), "disk", "40.0 of 1000 GB free"),
        (with_facts(shared_memory=64 * 10**6), "object store", "object store of 1.0 GB, /dev/shm of 0.1 GB"),
        (with_facts(authentication=False), "token", "not 'token' on 10.0.0.2"),
        (replace(FINE, clock_difference=-90.0), "clocks", "-90.0 s"),
        (replace(FINE, storage_problem="can't write: denied"), "storage", "can't write: denied"),
        (replace(FINE, facts=None, problem="does not answer"), "nodes", "does not answer"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(node: Node, name: str, expected: str) -> None:
    checks = checked(FINE, node)
    assert checks[name].state == "FAIL"
    assert expected in checks[name].found
    assert checks[name].remedy
    assert {check.state for check in checks.values() if check.name != name} == {"ok"}


def test_what_only_deserves_a_note() -> None:
    assert checked(with_facts(libraries=FACTS.libraries | {"FAISS GPUs": None}))["libraries"].state == "note"
    assert checked(with_facts(token_file_readable_by_others="/home/me/.ray/auth_token"))["token"].state == "note"
    assert checked(FINE, storage=None)["storage"].state == "note"


@pytest.mark.parametrize(
    ("endpoint", "storage", "state"),
    [
        ("http://minio.example:9000", "s3://bucket", "note"),
        ("https://minio.example:9000", "s3://bucket", "ok"),
        ("http://127.0.0.1:9000", "s3://bucket", "ok"),
        ("http://minio.example:9000", "/shared/runs", "ok"),
        (None, "s3://bucket", "ok"),
    ],
)
def test_a_store_without_tls_is_noticed(endpoint: str | None, storage: str, state: str) -> None:
    check = checked(FINE, with_facts(s3_endpoint=endpoint), storage=storage)["storage"]
    assert check.state == state
    assert (str(endpoint) in check.found) == (state == "note")


def test_a_store_that_fails_is_not_hidden_by_a_note() -> None:
    node = replace(with_facts(s3_endpoint="http://minio.example"), storage_problem="can't write: denied")
    assert checked(node)["storage"].state == "FAIL"


def test_faiss_is_one_library_under_two_names() -> None:
    def cluster(on_cpus: dict[str, str], on_gpus: dict[str, str]) -> Check:
        without = replace(
            FACTS, gpus=(), versions=FACTS.versions | on_cpus,
            libraries=FACTS.libraries | {"torch GPUs": 0, "FAISS GPUs": None},
        )  # fmt: skip
        head = replace(FINE, address="10.0.0.2", gpus=0, facts=without)
        return checked(with_facts(versions=FACTS.versions | on_gpus), head)["versions"]

    assert cluster({"faiss-cpu": "1.15.1"}, {"faiss-gpu": "1.15.1"}).state == "ok"
    other = cluster({"faiss-cpu": "1.15.1"}, {"faiss-gpu": "1.15.2"})
    assert (other.state, other.found) == ("FAIL", "differ between 2 nodes: faiss 1.15.1 on 1, 1.15.2 on 1")
    for alone in ({"faiss-gpu": "1.15.1"}, {"faiss-cpu": "1.15.1", "faiss-gpu": "1.15.1"}):
        assert cluster({}, alone).found == "differ between 2 nodes: faiss 1.15.1 on 1"


def test_a_build_for_cpus_is_the_same_version_as_one_for_gpus() -> None:
    on_cpus = replace(
        FACTS, gpus=(), versions=FACTS.versions | {"torch": "2.13.0+cpu"}, driver=None,
        libraries={"torch CUDA": None, "torch GPUs": 0, "FAISS GPUs": None},
    )  # fmt: skip
    head = replace(FINE, address="10.0.0.2", gpus=0, facts=on_cpus)
    checks = checked(FINE, head)
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["versions"].found.endswith("torch 2.13.0 and 2.13.0+cpu")
    assert checks["CUDA"].found == "torch is built for 12.8 on all nodes with GPUs"
    assert "CUDA" not in checked(head)
    older = replace(head, facts=replace(on_cpus, versions=FACTS.versions | {"torch": "2.12.0+cpu"}))
    assert checked(FINE, older)["versions"].state == "FAIL"


@pytest.mark.parametrize(
    ("cuda", "driver", "fails"),
    [("13.0", "550.1", True), ("13.0", "580.65.06", False), ("12.8", "524.9", True), ("12.8", "525.60.13", False),
     ("14.1", "550.1", False), ("12.8", None, False)],
)  # fmt: skip
def test_a_driver_must_be_new_enough_for_torch(cuda: str, driver: str | None, fails: bool) -> None:
    node = with_facts(driver=driver, libraries=FACTS.libraries | {"torch CUDA": cuda})
    check = checked(node)["CUDA"]
    assert check.state == ("FAIL" if fails else "ok")
    if fails:
        assert f"10.0.0.2: driver {driver}, CUDA {cuda} needs" in check.found


def test_a_relative_storage_is_the_folder_that_runs_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(
        doctor, "examine", lambda _, storage: asked.append(storage) or Cluster((FINE,), True, False, None, storage)
    )
    monkeypatch.setattr(doctor, "Folder", lambda _: None)  # which asks S3 for the bucket
    monkeypatch.chdir(tmp_path)
    for storage in ("runs", "s3://bucket/runs", None):
        doctor.diagnose(storage)
    assert asked == [str(tmp_path / "runs"), "s3://bucket/runs", None]


def test_an_open_dashboard_is_the_worst() -> None:
    found = checked(FINE, dashboard_open=True)["token"]
    assert found.state == "FAIL"
    assert "Anyone who reaches this cluster" in found.remedy


@pytest.mark.usefixtures("session")
def test_this_machine_is_examined(place: str, session: Any) -> None:
    cluster = examine(session, place)
    (node,) = cluster.nodes
    assert node.facts is not None
    assert node.facts.libraries["torch GPUs"] >= 0
    assert "error" not in node.facts.libraries
    assert node.facts.versions["ray"] == __import__("ray").__version__
    assert node.problem is node.storage_problem is None
    assert node.clock_difference == 0
    assert Folder(place).files() == {}


@pytest.mark.usefixtures("session")
def test_the_command_ends_with_one_where_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    done = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path / "file")])
    assert done.exit_code == 1, (done.output, done.exception)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1] in ("token", "storage")] == ["FAIL", "FAIL"]
    assert any("can't write" in line for line in lines)


def test_storage_that_is_not_shared_is_found(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")  # one path, two machines' own disks
    assert write_probe(first, "a") is None
    assert write_probe(second, "b") is None
    assert read_probes(first, ["a"]) is None
    assert "b" in str(read_probes(first, ["a", "b"]))
    assert delete_probe(first, "a") is None
    assert not Path(first).exists()
    (Path(second) / "another node's").touch()
    assert delete_probe(second, "b") is None
    assert Path(second).exists()


def test_a_clock_is_wrong_only_beyond_what_the_round_trip_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Clock:
        def __init__(self, ahead: float) -> None:
            self.now, self.ahead = self, ahead

        def remote(self) -> float:
            return time.time() + self.ahead

    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    assert _clock_difference(Clock(0.0)) == 0
    assert _clock_difference(Clock(60.0)) == pytest.approx(60, abs=0.1)
    assert _clock_difference(Clock(-60.0)) == pytest.approx(-60, abs=0.1)


def test_a_node_that_is_lost_while_it_is_examined_is_a_finding(
    session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_CLOCK_SECONDS", 0.5)
    monkeypatch.setattr(doctor._Witness, "now", lambda _: time.sleep(60))
    (node,) = examine(session, str(tmp_path)).nodes
    assert node.facts is None
    assert "does not answer" in str(node.problem)
    assert check_cluster(Cluster((node,), True, False, None, None))[0].state == "FAIL"


def test_a_token_file_that_others_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    token.chmod(0o644)
    assert node_facts._exposed_token_file() == str(token)
    token.chmod(0o600)
    assert node_facts._exposed_token_file() is None


def test_the_report_is_aligned() -> None:
    lines = report([Check("a", "ok", "fine"), Check("longer", "FAIL", "broken", "Mend it.")])
    assert lines == ["ok    a       fine", "FAIL  longer  broken", "              Mend it."]
