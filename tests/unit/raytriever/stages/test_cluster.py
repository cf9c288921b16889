import os
from pathlib import Path

import pytest
import ray

from raytriever.errors import UserError
from raytriever.stages import ray_session as cluster
from raytriever.stages.ray_session import RaySession

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "environ", dict(os.environ))
    cluster.os.environ.pop("RAY_ADDRESS", None)


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance\nat the address")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    cluster.os.environ["RAY_ADDRESS"] = "10.0.0.9:6379"
    with pytest.raises(UserError) as raised, RaySession() as session:
        session.start()
    assert str(raised.value) == (
        "No Ray cluster answers at RAY_ADDRESS=10.0.0.9:6379 (Could not find any running Ray instance). Start one with"
        " `ray start --head`, correct the address, or unset RAY_ADDRESS to run on this machine alone. Where"
        " lines above say InvalidAuthToken, it does answer and asks for its token: set RAY_AUTH_MODE=token, and"
        " RAY_AUTH_TOKEN_PATH to the file with it."
    )


def test_a_cluster_that_asks_for_a_token_says_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ray.exceptions.AuthenticationError("Token authentication is enabled but no token was found")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    cluster.os.environ["RAY_ADDRESS"] = "10.0.0.9:6379"
    with pytest.raises(UserError, match=r"RAY_ADDRESS=10\.0\.0\.9:6379.*RAY_AUTH_TOKEN_PATH") as raised:
        RaySession().start()
    assert "docs.ray.io" not in str(raised.value)


def test_a_ray_of_someone_else_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", None)
    monkeypatch.setattr(ray, "shutdown", None)
    with RaySession() as session:
        session.start()


@pytest.mark.parametrize(
    ("saved", "is_spread", "address", "others", "here"),
    [
        (0.0, False, None, False, True),
        (7.9, False, None, False, True),
        (8.1, False, None, False, False),  # workers would be faster
        (0.0, True, None, False, False),  # the user says how many
        (0.0, False, "10.0.0.9:6379", False, False),  # a cluster was asked for
        (0.0, False, None, True, False),  # another session's Ray runs here
    ],
)
def test_this_process_makes_what_workers_would_not_make_sooner(
    monkeypatch: pytest.MonkeyPatch, saved: float, is_spread: bool, address: str | None, others: bool, here: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: others)
    if address is not None:
        cluster.os.environ["RAY_ADDRESS"] = address
    assert RaySession().makes_here(saved, is_spread=is_spread) is here
    for fixed in (True, False):
        assert RaySession(shards_here=fixed).makes_here(saved, is_spread=is_spread) is fixed


def test_a_session_that_is_not_needed_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", None)
    monkeypatch.setattr(ray, "shutdown", None)
    with RaySession():
        pass


@pytest.mark.parametrize("address", [None, "10.0.0.9:6379"])
def test_metrics_are_a_clusters_alone(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_initialized", "init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("raytriever.stages.ray_session._end_with_ray", lambda *_: None)  # there is no process to watch
    cluster.os.environ.pop("RAY_enable_metrics_collection", None)
    if address:
        cluster.os.environ["RAY_ADDRESS"] = address
    with RaySession() as session:
        session.start()
    assert cluster.os.environ.get("RAY_enable_metrics_collection") == (None if address else "0")


def test_a_local_ray_stays_on_this_machine_and_finds_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.os.environ["PYTHONPATH"] = f"/mine{os.pathsep}{ROOT}"
    arguments = cluster._local_arguments(3)
    assert arguments["num_cpus"] == 3
    assert arguments["_node_ip_address"].startswith("127.")
    assert arguments["include_dashboard"] is False
    assert cluster.os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/mine"]
    monkeypatch.setattr("joblib.cpu_count", lambda: 7)
    assert RaySession().cpus == 7
