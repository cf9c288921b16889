"""Ray's session: whose Ray it uses, what it starts, and what is made without one."""

import logging
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util.queue

from raytriever.errors import UserError
from raytriever.stages import ray_session as cluster
from raytriever.stages.ray_session import RaySession

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "environ", dict(os.environ))
    cluster.os.environ.pop("RAY_ADDRESS", None)


ADDRESS = "10.0.0.9:6379"
SILENT = (
    f"No Ray cluster answers at RAY_ADDRESS={ADDRESS} (Could not find any running Ray instance). Start one with"
    " `ray start --head`, correct the address, or unset RAY_ADDRESS to run on this machine alone. If"
    " lines above say InvalidAuthToken, the cluster answers and asks for its token: set RAY_AUTH_MODE=token, and"
    " RAY_AUTH_TOKEN_PATH to the file with it."
)


@pytest.mark.parametrize(("error", "said"), [
    (ConnectionError("Could not find any running Ray instance\nat the address"), f"^{re.escape(SILENT)}$"),
    (ray.exceptions.AuthenticationError("but no token was found"), rf"RAY_ADDRESS={ADDRESS}.*RAY_AUTH_TOKEN_PATH"),
])  # fmt: skip
def test_a_cluster_that_does_not_let_us_in_is_named(monkeypatch, error: Exception, said: str) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    cluster.os.environ["RAY_ADDRESS"] = ADDRESS
    with pytest.raises(UserError, match=said) as raised, RaySession() as session:
        session.start()
    assert "docs.ray.io" not in str(raised.value)


def test_a_dashboard_is_no_cluster_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", None)
    cluster.os.environ["RAY_ADDRESS"] = "http://head:8265"
    with pytest.raises(UserError, match=r"http://head:8265 is the address of a dashboard.*raytriever submit"):
        RaySession().start()


def test_a_session_starts_no_ray_where_none_is_needed_or_someone_elses_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", None)
    monkeypatch.setattr(ray, "shutdown", None)  # nor does it end one
    with RaySession() as session:
        assert session is not None
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with RaySession() as session:
        session.start()


@pytest.mark.parametrize(("saved", "is_spread", "address", "others", "here"), [
    (0.0, False, None, False, True),
    (7.9, False, None, False, True),
    (8.1, False, None, False, False),  # workers would be faster
    (0.0, True, None, False, False),  # the user says how many
    (0.0, False, ADDRESS, False, False),  # a cluster was asked for
    (0.0, False, None, True, False),  # another session's Ray runs here
])  # fmt: skip
def test_this_process_makes_what_workers_would_not_make_sooner(monkeypatch, saved, is_spread, address, others, here):
    monkeypatch.setattr(ray, "is_initialized", lambda: others)
    if address is not None:
        cluster.os.environ["RAY_ADDRESS"] = address
    assert RaySession().makes_here(saved, is_spread=is_spread) is here
    for fixed in (True, False):
        assert RaySession(shards_here=fixed).makes_here(saved, is_spread=is_spread) is fixed


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_what_ray_is_started_with_and_who_watches_it(monkeypatch, logged: list[str], address: str | None) -> None:
    """By a Ray that only listens; metrics are a cluster's alone."""
    asked, threads = list[object](), list[dict[str, Any]]()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **how: (asked.append(how), signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    monkeypatch.setattr(cluster, "_make_token", lambda: asked.append("token"))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shut down"))
    monkeypatch.setattr(cluster, "_local_arguments", lambda cpus: {"num_cpus": cpus})
    thread = SimpleNamespace(start=lambda: asked.append("watched"))
    monkeypatch.setattr(cluster.threading, "Thread", lambda **how: threads.append(how) or thread)
    monkeypatch.setattr(cluster, "_quiet_ray_data", lambda: asked.append("quiet"))
    here = {**cluster._OWN_ENVIRONMENT, "RAY_BACKEND_LOG_LEVEL": "fatal"}
    for name in (*cluster._QUIET_ENVIRONMENT, *here):
        cluster.os.environ.pop(name, None)
    cluster.os.environ |= {"OMP_WAIT_POLICY": "mine"} | ({"RAY_ADDRESS": address} if address else {})
    handler = signal.getsignal(signal.SIGTERM)
    session = RaySession(3)
    session._closing.set()  # by the Ray before
    with session:
        session.start()
        assert session._closing.is_set() is bool(address)
        assert session.is_alone is not bool(address)  # on a cluster, machines may still come
    assert cluster.os.environ.items() >= {**cluster._QUIET_ENVIRONMENT, "OMP_WAIT_POLICY": "mine"}.items()
    assert {name: cluster.os.environ.get(name) for name in here} == (dict.fromkeys(here) if address else here)
    joined = {"address": address, "logging_level": logging.WARNING, "log_to_driver": False}
    started: list[object] = [joined] if address else ["token", {"num_cpus": 3}, "watched"]
    assert asked == [*started, "quiet", "shut down"]
    assert session._closing.is_set()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert ("joined the cluster at 10.0.0.9" if address else "local instance on 3 CPUs (0") in logged[-1]
    watch = {"target": cluster._end_with_ray, "args": [ray._private.worker.global_worker.node, session._closing]}
    assert threads == ([] if address else [{**watch, "daemon": True}])


@pytest.mark.parametrize(
    ("mode", "imported", "made"), [(None, False, True), ("k8s", False, False), (None, True, False)]
)
def test_a_token_is_made_where_ray_would_still_read_it(monkeypatch, mode, imported: bool, made: bool) -> None:
    monkeypatch.setattr(cluster.sys, "modules", {"ray": ray} if imported else {})
    cluster.os.environ.pop("RAY_AUTH_TOKEN", None)
    cluster.os.environ.pop("RAY_AUTH_MODE", None)
    cluster.os.environ |= {"RAY_AUTH_MODE": mode} if mode else {}
    cluster._make_token()
    assert cluster.os.environ.get("RAY_AUTH_MODE") == ("token" if made else mode)
    assert len(cluster.os.environ.get("RAY_AUTH_TOKEN", "")) == (64 if made else 0)


def test_what_native_code_says_while_ray_starts_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    with cluster._native_stderr_closed():
        os.write(2, b"hidden")
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"
    assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.parametrize(("polls", "closes_after", "waits", "ended"), [
    ([None, None, 1], 9, [0.5, 0.5, 0.5, 2], True),  # a process of Ray's dies
    ([None] * 8, 2, [0.5, 0.5, 0.5], False),  # Ray is shut down before
    ([None, 1], 2, [0.5, 0.5, 2, 0.5], False),  # or by a signal that came to all
])  # fmt: skip
def test_a_run_ends_with_its_ray(monkeypatch, logged: list[str], polls, closes_after: int, waits, ended: bool) -> None:
    killed, waited = list[object](), list[float]()

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > closes_after

    def leave(code: int) -> None:
        raise SystemExit(code)

    def process(poll: Any) -> SimpleNamespace:
        return SimpleNamespace(process=SimpleNamespace(poll=poll))

    processes = {"raylet": [process(lambda: None)], "gcs_server": [process(iter(polls).__next__)], "log_monitor": []}
    node = SimpleNamespace(all_processes=processes, kill_all_processes=lambda **how: killed.append(how))
    monkeypatch.setattr(cluster.os, "_exit", leave)
    with pytest.raises(SystemExit, match="1") if ended else nullcontext():
        cluster._end_with_ray(node, SimpleNamespace(wait=wait))  # type: ignore[arg-type]
    assert killed == [{"check_alive": False}] * ended
    assert ["Run the same command again" in line for line in logged] == [True] * ended
    assert waited == waits


def test_the_board_is_beside_the_driver_costs_no_cpu_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "ab" * 28))
    made, options = list[object](), dict[str, Any]()
    actor = SimpleNamespace(options=lambda **how: options.update(how) or SimpleNamespace(remote=lambda: "the actor"))
    monkeypatch.setattr(ray, "remote", lambda kind: made.append(kind) or actor)
    assert (cluster.open_board(), made) == ("the actor", [cluster.Board])
    place = options.pop("scheduling_strategy")
    assert (place.node_id, place.soft) == ("ab" * 28, False)
    assert options == {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}


def test_ray_data_shows_nothing_of_its_own() -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = True
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.INFO)
    cluster._quiet_ray_data()
    assert not context.enable_progress_bars
    assert not context.print_on_execution_start
    assert [logging.getLogger(name).level for name in ("ray.data", "ray.train")] == [logging.ERROR] * 2


def test_a_local_ray_stays_on_this_machine_and_finds_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.os.environ["PYTHONPATH"] = f"/mine{os.pathsep}{ROOT}"
    monkeypatch.setattr(cluster.secrets, "randbelow", lambda below: below - 1)
    arguments = cluster._local_arguments(3)
    assert arguments["num_cpus"] == 3
    assert arguments["_node_ip_address"] == "127.254.254.254"
    monkeypatch.setattr(cluster.secrets, "randbelow", lambda _: 0)
    assert cluster._local_arguments(3)["_node_ip_address"] == "127.1.1.1"
    assert arguments["include_dashboard"] is False
    assert cluster.os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/mine"]
    monkeypatch.setattr("joblib.cpu_count", lambda: 7)
    assert RaySession().cpus == 7
