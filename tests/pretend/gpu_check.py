"""What is checked on a GPU, rehearsed on the pretend device."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.device_checks import REHEARSED, Bench, Check, check_clustering, check_embedding, check_objective
from tests.pretend_device import DEVICE

CHECKS: dict[str, Check] = {
    "embedding": check_embedding,
    "k-means": check_clustering,
    "contrastive": partial(check_objective, "contrastive"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds(name: str, tmp_path: Path) -> None:
    finding = CHECKS[name](Bench(DEVICE, REHEARSED, tmp_path))
    assert finding.held, finding
