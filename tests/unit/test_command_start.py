"""What every process pays that imports anything of Raytriever: workers do it by the hundred."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.jobs import COMMANDS, JOBS, stage_class

HEAVY = ("numpy", "pyarrow", "pydantic", "ray", "rich", "torch", "yaml")


def test_the_command_alone_loads_nothing_that_it_may_not_need() -> None:
    code = f"import sys, raytriever; print(*[name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.split() == []


def test_help_lists_every_command_and_imports_none() -> None:
    code = """
import sys
from raytriever.cli import app
try:
    app(["--help"])
except SystemExit:
    print(*[name for name in sys.modules if name.split(".")[0] in ("ray", "torch", "retrieval", "pipelines")])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    *lines, imported = shown.splitlines()
    assert imported == ""
    for name, (_, line) in {**COMMANDS, **JOBS}.items():
        assert any(name in shown_line and line[:30] in shown_line for shown_line in lines)


@pytest.mark.parametrize("name", [*COMMANDS, "embed", "train"])
def test_every_command_is_where_the_table_says(name: str) -> None:
    ended = CliRunner().invoke(app, [name, "--help"])
    assert ended.exit_code == 0
    assert f"{name} [OPTIONS]" in ended.output


@pytest.mark.parametrize("job", JOBS)
def test_every_job_is_where_the_table_says(job: str) -> None:
    assert stage_class(job, job).command == job
