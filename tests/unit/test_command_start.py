"""What every process pays that imports anything of Raytriever: workers do it by the hundred."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raytriever
from raytriever.cli import app
from raytriever.jobs import COMMANDS, JOBS, stage_class

ROOT = Path(__file__).parents[2]
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
def test_every_command_and_job_is_where_the_table_says(name: str) -> None:
    assert {job: stage_class(job, job).command for job in JOBS} == {job: job for job in JOBS}
    ended = CliRunner().invoke(app, [name, "--help"])
    assert ended.exit_code == 0
    assert f"{name} [OPTIONS]" in ended.output


def test_what_nobody_expected_is_a_plain_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> None:
        raise ValueError("no good")

    monkeypatch.setattr("raytriever.cli._command", fail)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ValueError, match="no good") as raised:
        app(["doctor"])
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith("ValueError: no good\n")


def test_another_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    other = tmp_path / "trainers"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    ended = subprocess.run(
        [sys.executable, "-c", "import raytriever"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    expected = f"Raytriever needs its own package 'trainers' at {ROOT / 'trainers'}, and Python finds {other}"
    assert expected in last
    assert "take the other 'trainers' off PYTHONPATH" in last


def test_public_names_are_found_when_they_are_used_and_other_names_are_absent() -> None:
    for name in raytriever._PUBLIC:
        assert getattr(raytriever, name).__name__ == name
        assert name in dir(raytriever)
    with pytest.raises(AttributeError, match="has no attribute 'Batches'"):
        _ = raytriever.Batches
