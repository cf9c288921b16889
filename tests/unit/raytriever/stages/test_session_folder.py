"""Ray's sessions lie where this user alone may enter, whoever was there first."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raytriever.cluster.doctor import is_shut
from raytriever.errors import UserError
from raytriever.stages.ray_session import session_folder

root_alone = pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away, or become another user")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where anybody may write."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    return folder


def test_it_is_made_closed_and_found_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = session_folder()
    assert made == base / f"raytriever-{os.getuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert session_folder() == made
    monkeypatch.setenv("RAY_TMPDIR", str(base / "not" / "there"))
    assert session_folder().is_dir()
    monkeypatch.setenv("RAY_TMPDIR", str(made))  # one that is closed is taken as it is
    assert session_folder() == made


def test_a_folder_too_long_for_sockets_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    (long := tmp_path / ("x" * 40)).mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert session_folder() == Path("/tmp", f"raytriever-{os.getuid()}")
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert session_folder() == long


@pytest.mark.parametrize("how", ["755", "770", "701", "a link", pytest.param("somebody else's", marks=root_alone)])
def test_one_that_others_may_enter_or_own_is_refused(base: Path, tmp_path: Path, how: str) -> None:
    folder, theirs = base / f"raytriever-{os.getuid()}", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if how == "a link":
        folder.symlink_to(theirs)
    elif how == "somebody else's":
        os.chown(theirs.rename(folder), 65534, 65534)
    else:
        folder.mkdir()
        folder.chmod(int(how, 8))
    with pytest.raises(UserError, match="which other users can enter, or own"):
        session_folder()


def test_a_folder_is_shut_where_one_above_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    inside = tmp_path / "closed" / "session"
    inside.mkdir()
    inside.chmod(0o777)
    assert is_shut(inside)
    assert is_shut(tmp_path / "closed" / "not yet there")


@root_alone
def test_another_user_can_not_put_code_where_a_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's folders for copies of a job's program are open to all; what closes them is the folder above."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        Path(base).chmod(0o1777)
        monkeypatch.setenv("RAY_TMPDIR", base)
        resources = session_folder() / "ray" / "session_1" / "runtime_resources"
        resources.mkdir(parents=True)
        for folder in (resources, *resources.parents[:2]):
            folder.chmod(0o777)
        rename = f"os.rename({str(resources)!r}, {str(resources)!r} + '-mine')"
        attack = [sys.executable, "-c", f"import os; os.setgid(65534); os.setuid(65534); {rename}"]
        assert "PermissionError" in subprocess.run(attack, capture_output=True, text=True).stderr
        assert resources.is_dir()
        session_folder().chmod(0o777)  # the same attack where the folder above is open
        assert subprocess.run(attack, capture_output=True).returncode == 0
