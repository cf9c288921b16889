"""Ray's session: whose Ray it uses, what it starts, and what is made without one."""

import os
import re
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


ADDRESS = "10.0.0.9:6379"
SILENT = (
    f"No Ray cluster answers at RAY_ADDRESS={ADDRESS} (Could not find any running Ray instance). Start one with"
    " `ray start --head`, correct the address, or unset RAY_ADDRESS to run on this machine alone. If"
    " lines above say InvalidAuthToken, the cluster answers and asks for its token: set RAY_AUTH_MODE=token, and"
    " RAY_AUTH_TOKEN_PATH to the file with it."
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Could not find any running Ray instance\nat the address"), f"^{re.escape(SILENT)}$"),
        (ray.exceptions.AuthenticationError("but no token was found"), rf"RAY_ADDRESS={ADDRESS}.*RAY_AUTH_TOKEN_PATH"),
    ],
)
def test_a_cluster_that_does_not_let_us_in_is_named(monkeypatch, error: Exception, said: str) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    cluster.os.environ["RAY_ADDRESS"] = ADDRESS
    with pytest.raises(UserError, match=said) as raised, RaySession() as session:
        session.start()
    assert "docs.ray.io" not in str(raised.value)


def test_a_session_starts_no_ray_where_none_is_needed_or_someone_elses_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", None)
    monkeypatch.setattr(ray, "shutdown", None)  # nor does it end one
    with RaySession() as session:
        assert session is not None
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with RaySession() as session:
        session.start()


@pytest.mark.parametrize(
    ("saved", "is_spread", "address", "others", "here"),
    [
        (0.0, False, None, False, True),
        (7.9, False, None, False, True),
        (8.1, False, None, False, False),  # workers would be faster
        (0.0, True, None, False, False),  # the user says how many
        (0.0, False, ADDRESS, False, False),  # a cluster was asked for
        (0.0, False, None, True, False),  # another session's Ray runs here
    ],
)
def test_this_process_makes_what_workers_would_not_make_sooner(monkeypatch, saved, is_spread, address, others, here):
    monkeypatch.setattr(ray, "is_initialized", lambda: others)
    if address is not None:
        cluster.os.environ["RAY_ADDRESS"] = address
    assert RaySession().makes_here(saved, is_spread=is_spread) is here
    for fixed in (True, False):
        assert RaySession(shards_here=fixed).makes_here(saved, is_spread=is_spread) is fixed


@pytest.mark.parametrize("address", [None, ADDRESS])
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
