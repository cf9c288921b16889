"""Fixtures of the pipelines' tests."""

import os
from pathlib import Path

import pytest

from tests.unit.small_run import make_run


@pytest.fixture(params=["", ".gz", ".zst"])
def ending(request: pytest.FixtureRequest) -> str:
    """What a compressed file's name ends in; "" for a plain one."""
    return str(request.param)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real collections."""
    folder = os.environ.get("RAYTRIEVER_TEST_DATA")
    if not folder:
        pytest.skip("RAYTRIEVER_TEST_DATA does not name the folder of real collections")
    return Path(folder)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every artifact that a report may have, by its name there; no test changes one."""
    return make_run(tmp_path_factory.mktemp("small") / "run")
