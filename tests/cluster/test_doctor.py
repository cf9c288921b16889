"""`raytriever doctor` on a Ray that runs."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytriever.artifacts.storage import Folder
from raytriever.cli import app
from raytriever.cluster import doctor
from raytriever.cluster.doctor import check_nodes, examine


@pytest.mark.usefixtures("session")
def test_this_machine_is_examined(place: str, session: Any) -> None:
    (node,) = examine(session, place)
    assert node.facts is not None
    assert isinstance(node.facts.libraries["torch"], list)
    assert "error" not in node.facts.libraries
    assert node.facts.versions["ray"] == __import__("ray").__version__
    assert node.problem is node.storage_problem is None
    assert Folder(place).files() == {}


@pytest.mark.usefixtures("session")
def test_the_command_ends_with_one_where_something_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path / "file")])
    assert done.exit_code == 1, (done.output, done.exception)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1] == "storage"] == ["FAIL"]
    assert any("can't write" in line for line in lines)


def test_a_node_that_is_lost_is_a_finding(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise OSError("gone")

    monkeypatch.setattr(doctor, "_facts", lost)
    (node,) = examine(session, None)
    assert node.facts is None
    assert "does not answer" in str(node.problem)
    assert check_nodes([node], None)[0].state == "FAIL"
