"""What `raytriever doctor` makes of what nodes say: every finding on made-up facts."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.cluster import doctor
from raytriever.cluster.doctor import Check, Facts, Node, check_nodes, examine, probe_storage, report

FACTS = Facts(
    versions={"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0"},
    libraries={"torch": ["A100", "A100"], "faiss": 2},
    disk={"session": (90 * 10**9, 100 * 10**9), "cache": (50 * 10**9, 100 * 10**9)},
)
FINE = Node("10.0.0.1", gpus=2, facts=FACTS)


def checked(*nodes: Node, storage: str | None = "s3://bucket") -> dict[str, Check]:
    return {check.name: check for check in check_nodes(nodes, storage)}


def with_facts(**changes: Any) -> Node:
    return replace(FINE, address="10.0.0.2", facts=replace(FACTS, **changes))


def test_a_sound_cluster_passes_and_some_things_only_deserve_a_note() -> None:
    checks = checked(FINE, replace(FINE, address="10.0.0.2"))
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["GPUs"].found == "4: A100"
    assert "90 GB" in checks["disk"].found
    assert checked(with_facts(versions={"ray": "2.60.0"}))["versions"].state == "ok"
    without = with_facts(libraries=FACTS.libraries | {"faiss": None})
    assert checked(without)["FAISS"].state == "note"
    assert checked(without, with_facts(libraries=FACTS.libraries | {"faiss": 1}))["FAISS"].state == "FAIL"
    assert checked(FINE, storage=None)["storage"].state == "note"


@pytest.mark.parametrize(("node", "name", "expected"), [
    (with_facts(versions=FACTS.versions | {"torch": "2.12.0"}), "versions", "torch 2.12.0 on 1, 2.13.0 on 1"),
    (with_facts(versions={"Python": "3.11.7", "ray": "2.60.0"}), "versions", "torch 2.13.0 on 1"),
    (replace(FINE, gpus=8), "GPUs", "Ray hands out 8, torch 2.13.0 sees 2"),
    (with_facts(libraries={"error": "libcudart is missing"}), "GPUs", "libcudart is missing"),
    (with_facts(libraries=FACTS.libraries | {"error": "FAISS can't be"}), "FAISS", "FAISS can't be"),
    (with_facts(libraries=FACTS.libraries | {"faiss": 1}), "FAISS", "FAISS sees 1 of 2 GPUs"),
    (with_facts(disk=FACTS.disk | {"cache": (10**9, 10**12)}), "disk", "1.0 of 1000 GB free for the cache"),
    (with_facts(disk=FACTS.disk | {"session": (40 * 10**9, 10**12)}), "disk", "40.0 of 1000 GB free"),
    (with_facts(disk=FACTS.disk | {"session": (5 * 10**9, 50 * 10**9)}), "disk", "5.0 of 50 GB free"),
    (with_facts(open_session="/tmp/ray/session"), "session", "10.0.0.2: /tmp/ray/session"),
    (replace(FINE, storage_problem="can't write: denied"), "storage", "can't write: denied"),
    (replace(FINE, facts=None, problem="does not answer"), "nodes", "does not answer"),
])  # fmt: skip
def test_each_fault_is_found_and_says_what_to_do(node: Node, name: str, expected: str) -> None:
    checks = checked(FINE, node)
    assert checks[name].state == "FAIL"
    assert expected in checks[name].found
    assert checks[name].remedy
    states = {check.state for check in checks.values() if check.name != name}
    assert states <= ({"ok", "note"} if "error" in (node.facts or FACTS).libraries else {"ok"})


def head(**versions: str) -> Node:
    """A node without GPUs, whose torch and FAISS are for CPUs."""
    facts = replace(FACTS, versions=FACTS.versions | versions, libraries={"torch": [], "faiss": None})
    return replace(FINE, address="10.0.0.2", gpus=0, facts=facts)


@pytest.mark.parametrize(("on_cpus", "on_gpus", "found"), [
    ({"faiss-cpu": "1.15.1"}, {"faiss-gpu": "1.15.1"}, None),
    ({"faiss-cpu": "1.15.1"}, {"faiss-gpu": "1.15.2"}, "faiss 1.15.1 on 1, 1.15.2 on 1"),
    ({}, {"faiss-gpu": "1.15.1"}, "faiss 1.15.1 on 1"),
    ({}, {"faiss-cpu": "1.15.1", "faiss-gpu": "1.15.1"}, "faiss 1.15.1 on 1"),
    ({"torch": "2.13.0+cpu"}, {}, None),
    ({"torch": "2.12.0+cpu"}, {}, "torch 2.12.0 on 1, 2.13.0 on 1"),
])  # fmt: skip
def test_builds_for_cpus_and_for_gpus_are_one_version_of_a_library(on_cpus, on_gpus, found) -> None:
    checks = checked(with_facts(versions=FACTS.versions | on_gpus), head(**on_cpus))
    versions = checks.pop("versions")
    if found is None:
        assert {check.state for check in [versions, *checks.values()]} == {"ok"}
        assert "torch 2.13.0" in versions.found
        assert "+cpu" not in versions.found
    else:
        assert (versions.state, versions.found) == ("FAIL", f"differ between 2 nodes: {found}")


def test_a_relative_storage_is_the_folder_that_runs_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, looked_at = list[str | None](), list[str]()
    monkeypatch.setattr(doctor, "examine", lambda _, storage: asked.append(storage) or [FINE])
    monkeypatch.setattr(doctor, "Folder", looked_at.append)  # which asks S3 for the bucket
    monkeypatch.chdir(tmp_path)
    for storage in ("runs", "s3://bucket/runs", None):
        doctor.diagnose(storage)
    assert asked == [str(tmp_path / "runs"), "s3://bucket/runs", None]
    assert looked_at == ["runs", "s3://bucket/runs"]


def test_storage_that_is_not_shared_is_found(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")  # one path, two machines' own disks
    assert probe_storage("write", first, ["a"]) is None
    assert probe_storage("write", second, ["b"]) is None
    assert probe_storage("read", first, ["a"]) is None
    assert "b" in str(probe_storage("read", first, ["a", "b"]))
    assert probe_storage("delete", first, ["a"]) is None
    assert not Path(first).exists()
    (Path(second) / "another node's").touch()
    assert probe_storage("delete", second, ["b"]) is None
    assert Path(second).exists()


def test_the_report_is_aligned_and_a_failure_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("a", "ok", "fine"), Check("longer", "FAIL", "broken", "Mend it.")]
    assert report(checks) == ["ok    a       fine", "FAIL  longer  broken", "              Mend it."]
    for count, code in ((1, 0), (2, 1)):
        monkeypatch.setattr(doctor, "diagnose", lambda _, count=count: checks[:count])
        done = CliRunner().invoke(app, ["doctor"])
        assert (done.exit_code, done.stdout.splitlines()) == (code, report(checks[:count]))


def test_a_node_that_does_not_answer_is_told_with_the_first_line_of_why(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a": FACTS, "b": RuntimeError("lost\nTraceback …"), "c": ValueError()}
    resources = {"a": {}, "b": {"GPU": 2}, "c": {"GPU": 2}, "dead": {}}
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": name in names, "Resources": resources[name]}
        for name in reversed(resources)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(doctor, "_on_nodes", lambda *_: names)
    monkeypatch.setattr(doctor, "_try_storage", lambda answering, _: dict.fromkeys(answering, "denied"))
    started: list[bool] = []
    found = examine(SimpleNamespace(start=lambda: started.append(True)), "runs")  # type: ignore[arg-type]
    assert started == [True]
    assert [node.storage_problem for node in found] == ["denied", None, None]
    assert [node.problem for node in found] == [None, "does not answer (lost)", "does not answer (ValueError)"]
    assert [node.facts for node in found] == [FACTS, None, None]
    assert [(node.address, node.gpus) for node in found] == [("a", 0), ("b", 2), ("c", 2)]


def test_every_node_tries_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_nodes(function: Any, given: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """On this machine; the node ``b`` can't write, and nobody reads what it should have written."""
        step = next(iter(given.values()))[0]
        denied = {"b": "denied"} if step == "write" else {}
        return {name: denied.get(name) or function(*each) for name, each in given.items()}

    monkeypatch.setattr(doctor, "_on_nodes", on_nodes)
    assert doctor._try_storage(["a", "b"], str(tmp_path)) == {"b": "can't write: denied"}
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    problems = doctor._try_storage(["a"], str(tmp_path / "file"))
    assert problems["a"].startswith("can't write: ")


@pytest.mark.parametrize(("program", "found"), [
    ('print("a warning"); print("{\\"torch\\": [\\"A100\\"]}")', {"torch": ["A100"]}),
    ('import json, os, sys; print(json.dumps(["CUDA_VISIBLE_DEVICES" in os.environ, "/here" in sys.path]))',
     [False, True]),
    ('raise ValueError("no good")', {"error": "ValueError: no good"}),
    ("raise SystemExit(3)", {"error": "ended with code 3"}),
    ("import time; time.sleep(60)", {"error": "torch and FAISS did not load within 2 s"}),
])  # fmt: skip
def test_what_the_libraries_see_is_asked_of_another_process(monkeypatch, program: str, found: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # a worker's own, where all of the node's count
    monkeypatch.syspath_prepend("/here")
    monkeypatch.setattr(doctor, "_PROBE", program)
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 2 if "sleep" in program else 60)
    assert doctor._gpus_of_libraries() == found


@pytest.mark.parametrize(
    ("is_shut", "variables", "is_open"),
    [(False, {}, True), (True, {}, False), (False, {"KUBERNETES_SERVICE_HOST": "x"}, False)],
)
def test_a_session_folder_that_others_may_enter_is_found(monkeypatch, tmp_path, is_shut, variables, is_open) -> None:
    session = str(tmp_path / "not" / "yet")
    monkeypatch.setattr(global_worker, "node", SimpleNamespace(get_session_dir_path=lambda: session))
    monkeypatch.setattr(doctor, "_gpus_of_libraries", dict)
    monkeypatch.setattr(doctor, "is_shut", lambda _: is_shut)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    facts = doctor._facts()
    assert facts.open_session == (session if is_open else None)
    assert facts.disk["session"][1] == shutil.disk_usage(tmp_path).total


def test_all_nodes_are_asked_at_once_and_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits, asked = [100.0], list[float](), list[Any]()

    def options(scheduling_strategy: Any) -> SimpleNamespace:
        assert not scheduling_strategy.soft
        return SimpleNamespace(remote=lambda *given: asked.append((scheduling_strategy.node_id, *given)) or given[0])

    def get(answer: str, timeout: float) -> str:
        assert len(asked) == 3
        waits.append(timeout)
        clock[0] += doctor._ANSWER_SECONDS - 2
        if answer == "lost":
            raise TimeoutError
        return answer

    def remote(**how: object) -> Any:
        assert how == {"num_cpus": 0, "max_retries": 0}
        return lambda function: SimpleNamespace(options=options) if function is print else None

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    names = {letter * 56: (answer,) for letter, answer in zip("abc", ("first", "lost", "last"), strict=True)}
    found = doctor._on_nodes(print, names)
    assert asked == [(name, *given) for name, given in names.items()]
    assert waits == [doctor._ANSWER_SECONDS, 2, 1]  # a moment for each that comes late
    assert [type(answer) for answer in found.values()] == [str, TimeoutError, str]
    assert list(found) == list(names)
