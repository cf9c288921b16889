"""What happens to an artifact after it was made: damage is found before use, and nothing beside it is touched."""

import os
import re
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from raytriever.artifacts.artifact import CHECKED, Artifact, Derivation, ShardRecord, ShardWriter, is_artifact, read_run
from raytriever.artifacts.storage import Folder
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.cli import app
from raytriever.errors import UserError

DERIVATION = Derivation("numbers", "count", 1, {"first": 1}, {})
NAME = "parts/one.txt"


def make_shard(folder: Folder, derivation: Derivation = DERIVATION) -> ShardRecord:
    with folder.scratch() as scratch:
        shard = ShardWriter(folder, "all", scratch, derivation.digest)
        for name in (NAME, "parts/two.txt"):
            shard.path(name).write_text(f"bytes of {name}")
            shard.add(name)
        return shard.commit(2)


def make(folder: Path | str, derivation: Derivation = DERIVATION, **options: Any) -> Artifact:
    writer = ArtifactWriter(str(folder), derivation, **options)
    with writer.making() as finished:
        records = [*finished.values()] or [make_shard(writer.folder, derivation)]
        return writer.finish(records, {}, {"seconds": 1.0})


@pytest.fixture
def made(tmp_path: Path) -> Artifact:
    return make(tmp_path / "made")


def stored_file(artifact: Artifact) -> Path:
    return Path(artifact.uri) / NAME


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "said"), [
    (flip, "is damaged: its SHA-256 differs"),
    (lambda path: os.truncate(path, 4), "is damaged"),
    (lambda path: path.unlink(), "is missing though its manifest lists it"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "is missing though its manifest lists it"),
])  # fmt: skip
def test_a_file_that_is_not_the_manifests_is_named_before_it_is_used(made, damage, said):
    damage(stored_file(made))
    opened = (lambda artifact: artifact.path(NAME)), (lambda artifact: artifact.open(NAME))
    for use in (Artifact.check, Artifact.verify, Artifact.local_folder, *opened):
        with pytest.raises(UserError, match=said) as raised:
            use(Artifact(made.uri))
        assert str(stored_file(made)) in str(raised.value)
    Artifact(made.uri).path("parts/two.txt")


def test_what_has_not_changed_is_not_read_again(made, monkeypatch):
    read: list[str] = []
    whole = Folder.sha256
    monkeypatch.setattr(Folder, "sha256", lambda folder, name: read.append(name) or whole(folder, name))
    Artifact(made.uri).check()
    Artifact(made.uri).path(NAME)
    assert read == []
    os.utime(stored_file(made))  # as a copy has it: another time, the same bytes
    Artifact(made.uri).check()
    assert read == [NAME]
    Artifact(made.uri).check()
    assert read == [NAME]
    os.utime(stored_file(made), (0, 0))
    Artifact(made.uri).verify()
    read.clear()
    Artifact(made.uri).check()  # the comparison is written down
    assert read == []
    (Path(made.uri) / CHECKED).unlink()
    artifact = Artifact(made.uri)
    artifact.path(NAME), artifact.path(NAME)
    assert read == [NAME]


def test_verify_reads_every_byte_whatever_the_times_say(made):
    path = stored_file(made)
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    Artifact(made.uri).check()
    with pytest.raises(UserError, match="is damaged"):
        Artifact(made.uri).verify()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("kept") / "made")


@given(st.binary(max_size=60) | st.sampled_from([b"{}", b"[]", b'{"a": 1}', b'{"a": [1]}', b"[" * 5000]))
def test_any_record_of_what_was_compared_is_taken_or_left(kept, data):
    (Path(kept.uri) / CHECKED).write_bytes(data)
    Artifact(kept.uri).check()
    flip(stored_file(kept))
    with pytest.raises(UserError, match="is damaged"):
        Artifact(kept.uri).check()
    flip(stored_file(kept))  # as it was


def test_a_shard_whose_files_changed_while_nobody_looked_is_made_again(tmp_path):
    writer = ArtifactWriter(str(tmp_path / "made"), DERIVATION)
    writer.begin()
    make_shard(writer.folder)  # then the run was killed
    assert ArtifactWriter(writer.folder.uri, DERIVATION).begin().keys() == {"all"}
    flip(tmp_path / "made" / NAME)
    assert ArtifactWriter(writer.folder.uri, DERIVATION).begin() == {}


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("linked", ["folder", "file"])
def test_what_a_link_leads_to_is_never_removed(tmp_path, linked, with_manifest):
    made = make(tmp_path / "made")
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "deep" / "thesis.txt").write_text("years")
    link = Path(made.uri) / "parts" / "extra"
    link.symlink_to(victim if linked == "folder" else victim / "deep" / "thesis.txt")
    if not with_manifest:
        (Path(made.uri) / "manifest.json").rename(Path(made.uri) / "building.json")
    for derivation in (DERIVATION, Derivation("numbers", "count", 1, {"first": 2}, {})):
        with pytest.raises(UserError, match=f"{link} is a link"):
            make(tmp_path / "made", derivation, replace=True)
    assert (victim / "deep" / "thesis.txt").read_text() == "years"
    assert stored_file(made).exists()
    Folder(made.uri).delete_temporary()
    Folder(made.uri).delete_empty_folders()
    assert (victim / "deep").is_dir()


def test_a_folder_may_be_reached_by_a_link_and_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")  # a folder reached by a link is an output like any other
    made = make(tmp_path / "runs" / "made")
    assert is_artifact(str(tmp_path / "disk" / "made"))
    for name in ("manifest.json", "run.json"):
        (tmp_path / "disk" / "made" / name).unlink()
        os.mkfifo(tmp_path / "disk" / "made" / name)
    assert made.run_facts() == {}
    (tmp_path / "disk" / "made" / "run.json").unlink()
    made.folder.write_bytes("run.json", b"[]")
    with pytest.raises(UserError, match=r"run\.json is damaged\. It only records times"):
        made.run_facts()
    with pytest.raises(UserError, match="holds no artifact"):
        Artifact(made.uri)
    with pytest.raises(UserError, match="no artifact but holds files"):
        ArtifactWriter(made.uri, DERIVATION)


@given(st.binary(max_size=80) | st.sampled_from([b"{", b"[]", b"[" * 100_000, b'"x"', b"1e999", b'{"recipe": []}']))
def test_any_manifest_and_any_run_file_is_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    for name in ("manifest.json", "run.json", "building.json"):
        (folder / name).write_bytes(data)
    for use in (Artifact, lambda uri: read_run(Folder(uri)), lambda uri: ArtifactWriter(uri, DERIVATION)):
        with suppress(UserError):
            use(str(folder))
    assert (folder / "manifest.json").read_bytes() == data


def test_the_command_reads_all_artifacts_of_a_folder(tmp_path):
    for name in ("one", "two"):
        make(tmp_path / "run" / name)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert (done.exit_code, done.stdout.count("ok")) == (0, 2)
    flip(tmp_path / "run" / "two" / NAME)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 1
    assert f"ok    {tmp_path}/run/one  numbers, 2 files, 0.0 MB" in done.stdout
    assert f"{tmp_path}/run/two/{NAME} is damaged" in " ".join(done.stdout.split())
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "one")]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(tmp_path)]).exit_code == 1
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_any_other(tmp_path, mask):
    """Some libraries write weights for their owner alone, and others on shared storage could not read them."""
    script = f"""
import os; os.umask({mask})
from pathlib import Path
from raytriever.artifacts.storage import Folder
folder = Folder({str(tmp_path)!r})
with folder.scratch() as scratch:
    (scratch / "x").touch(0o600); folder.put("x", scratch / "x")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[4])
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask


def test_the_security_page_names_tests_that_exist():
    root = Path(__file__).parents[4]
    named = re.findall(r"`((?:unit|cluster)/[^`]+\.py)`", (root / "SECURITY.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (root / "tests" / name).is_file()] == []
