import pytest


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Every test here computes in one thread."""
