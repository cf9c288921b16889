"""Tests for a process of their own: ``tests/unit/test_pretend_device.py`` starts it and names their files."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Every test here computes in one thread."""


@pytest.fixture(autouse=True)
def placement() -> Iterator[None]:
    """Tensors may be made on the pretend device, which is registered where a test is run and not before."""
    from tests.pretend_device import Placement

    with Placement():
        yield
