"""One Ray for all tests of this folder that run jobs in this process."""

from collections.abc import Iterator

import pytest

from raytriever.stages.ray_session import RaySession


@pytest.fixture(scope="package")
def session(object_store: str, cache: object) -> Iterator[RaySession]:  # noqa: ARG001
    """Ray on 2 CPUs, whose workers find the cache and the object store in their environment."""
    with RaySession(cpus=2, shards_here=False) as session:
        session.start()
        yield session
