"""One Ray for all tests of this folder that run jobs in this process; all but a smoke run of them are slow."""

from collections.abc import Iterator

import pytest

from raytriever.stages.ray_session import RaySession


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs Ray, the one here or a cluster of its own, is slow, but for the smoke run: a stage, a sweep, a job."""
    for item in items:
        if {"session", "cluster"} & set(getattr(item, "fixturenames", ())) and "smoke" not in item.keywords:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def session(object_store: str, cache: object) -> Iterator[RaySession]:  # noqa: ARG001
    """Ray on 2 CPUs, whose workers find the cache and the object store in their environment."""
    with RaySession(cpus=2, shards_here=False) as session:
        session.start()
        yield session
