"""Recipes on the real collections of ``RAYTRIEVER_TEST_DATA``."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.raytriever.test_cli import options

DATA = os.environ.get("RAYTRIEVER_TEST_DATA", "")
needs_data = [
    pytest.mark.skipif(not DATA, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections"),
    pytest.mark.skipif(find_spec("faiss") is None, reason="FAISS is not installed"),
]


def run_recipe(name: str, settings: Mapping[str, object], output: Path) -> None:
    """Ends with a report that has a result."""
    command = [sys.executable, "-m", "raytriever", "run", name, *options(settings), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<h2>Result</h2>" in (output / "report" / "report.html").read_text(encoding="utf-8")
