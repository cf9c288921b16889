"""What every process pays that imports anything of Raytriever: workers do it by the hundred."""

import subprocess
import sys

import typer

from raytriever.cli import app
from raytriever.jobs import JOBS

HEAVY = ("numpy", "pyarrow", "pydantic", "ray", "rich", "torch", "yaml")


def test_the_command_alone_loads_nothing_that_it_may_not_need() -> None:
    code = f"import sys, raytriever; print(*[name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.split() == []


def test_every_command_is_there() -> None:
    others = {"run", "sweep", "show", "compare", "push", "submit", "jobs", "doctor"}
    assert set(typer.main.get_group(app).commands) == {*JOBS, *others}
