"""Fixtures of the formats' tests."""

import pytest


@pytest.fixture(params=["", ".gz", ".zst"])
def ending(request: pytest.FixtureRequest) -> str:
    """What a compressed file's name ends in; "" for a plain one."""
    return str(request.param)
