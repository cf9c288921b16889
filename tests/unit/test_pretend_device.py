"""Training and what follows it on a pretend GPU: in a process of its own, as torch never forgets a device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "pretend"
INTERFACE = "_setup_privateuseone_for_python_backend"


def test_torch_still_takes_a_device_written_in_python():
    """It had the interface, which it calls experimental, in 2.13."""
    assert hasattr(backend_registration, INTERFACE), (
        f"torch {torch.__version__} has no torch.utils.backend_registration.{INTERFACE} any more, by which"
        " tests/pretend_device.py registers its device: 2.13.0 had it. Register it as this version wants, or pin torch."
    )


@pytest.mark.slow
def test_on_the_pretend_device():
    files = sorted(str(path) for path in CASES.glob("*.py") if path.name != "conftest.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"\n{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d\d+ passed.*", summary), summary
    assert "skipped" not in summary
