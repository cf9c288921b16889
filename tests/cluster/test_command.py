"""The command on Ray: what a finished artifact and a full disk make of it."""

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from tests.unit.raytriever.test_cli import collect_of, finished, hashes, pairs_of, refused, write_collection

__all__ = ["finished"]


def test_a_single_job_refuses_another_artifact_unless_forced(finished, session, tmp_path):  # noqa: ARG001
    shutil.copytree(finished / "out", tmp_path / "out")
    folder = tmp_path / "out"
    arguments = pairs_of(tmp_path, "test", folder / "pairs")
    assert "reused" in CliRunner().invoke(app, arguments).stderr
    changed = [*arguments, "--set", "minimum_relevance=2"]
    before = hashes(folder)
    said = refused(*changed)
    assert "config.minimum_relevance: 1 there, 2 now" in said
    assert "--force" in said
    assert hashes(folder) == before
    assert CliRunner().invoke(app, [*changed, "--force"]).exit_code == 0
    assert json.loads((folder / "pairs" / "manifest.json").read_text())["rows"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named_and_what_is_finished_stays(finished, session, small_disk, tmp_path):  # noqa: ARG001
    shutil.copytree(finished / "out", small_disk / "out")
    before = hashes(small_disk / "out")
    lines = [json.dumps({"_id": str(i), "text": secrets.token_hex(1000)}) for i in range(2000)]
    data = write_collection(tmp_path / "data", lines)
    arguments = collect_of(data, small_disk / "large")
    said = refused(*arguments)
    assert str(small_disk / "large") in said
    assert "No space left on device" in said
    assert "run the same command again" in said
    assert hashes(small_disk / "out") == before
    assert hashes(small_disk / "large") == {}

    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    assert CliRunner().invoke(app, arguments).exit_code == 0
