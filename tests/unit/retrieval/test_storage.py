"""Folders: a file is whole or absent, on the local disk and in an object store."""

import errno
import hashlib
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import TEMPORARY_PREFIX, Folder, absolute, cache_folder, sha256_of


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything_in(folder: Path) -> list[str]:
    """Names below a local folder, temporary ones too."""
    return sorted(path.name for path in folder.rglob("*"))


def put(folder: Folder, name: str, data: bytes) -> None:
    with folder.scratch() as scratch:
        (scratch / "built").write_bytes(data)
        folder.put(name, scratch / "built")


def test_what_is_written_is_read(place: str) -> None:
    folder = Folder(place)
    assert folder.files() == {}
    assert not folder.exists("a/b.txt")
    written = {"a/b.txt": b"one", "a/c/d.txt": b"", "é ü.bin": bytes(range(256)), "z": b"last"}
    for name, data in written.items():
        folder.write_bytes(name, data)
    assert folder.files() == {name: len(data) for name, data in sorted(written.items())}
    assert list(folder.files()) == sorted(written)
    for name, data in written.items():
        assert folder.exists(name)
        assert folder.read_bytes(name) == data
        assert folder.sha256(name) == sha256(data)
        with folder.open_input(name) as file:
            assert file.read() == data
    assert not folder.exists("a")  # a folder is no file


def test_a_file_larger_than_an_upload_part_arrives_whole(place: str) -> None:
    data = os.urandom(1 << 20) * 12
    put(Folder(place), "large", data)
    assert Folder(place).sha256("large") == sha256(data)


def test_writing_again_replaces(place: str) -> None:
    folder = Folder(place)
    folder.write_bytes("name", b"a longer first version")
    folder.write_bytes("name", b"second")
    assert folder.read_bytes("name") == b"second"


def test_what_is_absent_says_so(place: str) -> None:
    folder = Folder(place)
    folder.write_bytes("there", b"x")
    for read in (folder.read_bytes, folder.sha256, folder.open_input, lambda name: folder.local_path(name, "0" * 64)):
        with pytest.raises(FileNotFoundError):
            read("absent")
    folder.delete("absent")
    assert list(folder.files()) == ["there"]


def test_deleting_takes_one_file(place: str) -> None:
    folder = Folder(place)
    for name in ("a/1", "a/2", "b/1"):
        folder.write_bytes(name, b"x")
    folder.delete("a/1")
    folder.delete("b/1")
    folder.delete_empty_folders()
    assert list(folder.files()) == ["a/2"]


def test_a_folder_below_is_a_folder(place: str) -> None:
    below = Folder(place + "/") / "one" / "two"
    below.write_bytes("x", b"1")
    assert Folder(place).read_bytes("one/two/x") == b"1"
    assert below.describe("x") == f"{place}/one/two/x"
    assert pickle.loads(pickle.dumps(below)).read_bytes("x") == b"1"


@pytest.mark.parametrize("failing", [KeyboardInterrupt, OSError, ValueError])
def test_a_failing_writer_leaves_nothing(tmp_path: Path, failing: type[BaseException]) -> None:
    folder = Folder(str(tmp_path / "f"))
    folder.write_bytes("name", b"before")

    def write() -> None:
        with folder.scratch() as scratch:
            (scratch / "half").write_bytes(b"half of it")
            raise failing

    with pytest.raises(failing):
        write()
    assert everything_in(tmp_path / "f") == ["name"]
    assert folder.read_bytes("name") == b"before"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = Folder(str(tmp_path / "f"))
    folder.write_bytes("name", b"before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[step], fail)
        with pytest.raises(OSError, match="full"):
            folder.write_bytes("name", b"after")
    assert everything_in(tmp_path / "f") == ["name"]
    assert folder.read_bytes("name") == b"before"


def test_a_local_file_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    synced, moved = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), synced(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("rename"), moved(path, to)))
    Folder(str(tmp_path)).write_bytes("name", b"x")
    assert events == ["sync", "rename", "sync"]  # the file, its name, the folder that holds the name


def test_temporary_files_are_invisible_and_swept(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write_bytes("kept", b"x")
    with folder.scratch() as scratch:
        assert scratch.parent == tmp_path  # a rename must not cross file systems
        (scratch / "deep").mkdir()
        (scratch / "deep" / "half").write_bytes(b"x")
        assert list(folder.files()) == ["kept"]
    left_by_a_kill = tmp_path / f"{TEMPORARY_PREFIX}abc"
    left_by_a_kill.mkdir()
    (left_by_a_kill / "half").write_bytes(b"x")
    assert list(folder.files()) == ["kept"]
    folder.delete_temporary()
    assert everything_in(tmp_path) == ["kept"]


def test_a_remote_file_is_copied_once_and_checked(object_store: str, cache: Path) -> None:
    folder = Folder(f"{object_store}/copied")
    folder.write_bytes("name", b"the bytes")
    path = folder.local_path("name", sha256(b"the bytes"))
    assert path == cache_folder() / "files" / sha256(b"the bytes")
    assert path.read_bytes() == b"the bytes"
    assert path.is_relative_to(cache)
    folder.delete("name")
    assert folder.local_path("name", sha256(b"the bytes")) == path


def test_a_damaged_download_is_refused_and_not_kept(object_store: str) -> None:
    folder = Folder(f"{object_store}/damaged")
    folder.write_bytes("name", b"other bytes")
    expected = sha256(b"the bytes that were meant")
    with pytest.raises(UserError, match=f"{object_store}/damaged/name is damaged: its SHA-256 is not {expected}"):
        folder.local_path("name", expected)
    assert not (cache_folder() / "files" / expected).exists()
    assert not list((cache_folder() / "files").glob(f"{TEMPORARY_PREFIX}*"))


def test_a_local_file_needs_no_copy(tmp_path: Path) -> None:
    Folder(str(tmp_path)).write_bytes("name", b"x")
    assert Folder(str(tmp_path)).local_path("name", "not looked at") == tmp_path / "name"
    assert sha256_of(tmp_path / "name") == sha256(b"x")


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket", "s3://key:secret@bucket/runs"])
def test_keys_in_a_uri_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY") as refused:
        Folder(uri)
    assert "secret@" not in str(refused.value)


def test_public_access_is_no_key() -> None:
    assert Folder("gs://anonymous@bucket/runs").uri == "gs://anonymous@bucket/runs"


@pytest.mark.parametrize("uri", ["ftp://host/x", "s3://", "nonsense://x", "s3://bucket/white space"])
def test_a_uri_that_cannot_be_opened_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match=r"can't be opened as a folder: .* Use a local path, s3://"):
        Folder(uri)


def test_options_in_a_uri_are_refused() -> None:
    """They would end up in the middle of every name below it."""
    with pytest.raises(UserError, match=r"s3://bucket/x\?region=y holds options.*environment \(AWS_REGION"):
        Folder("s3://bucket/x?region=y")


def test_local_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert absolute("a/b") == str(tmp_path / "a/b")
    assert absolute("~/a") == "/home/someone/a"
    assert absolute("s3://bucket/a") == "s3://bucket/a"
    Folder("relative").write_bytes("x", b"1")
    assert (tmp_path / "relative" / "x").read_bytes() == b"1"
    assert Folder(f"file://{tmp_path}/relative").is_local


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..") and not name.startswith(TEMPORARY_PREFIX) and len(name.encode()) <= 200
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), unique=True, max_size=4))
def test_any_name_comes_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = Folder(str(tmp_path_factory.mktemp("names")))
    written = []
    for name in names:
        if not any(name.startswith(f"{other}/") or other.startswith(f"{name}/") for other in written):
            folder.write_bytes(name, name.encode())
            written.append(name)
    assert list(folder.files()) == sorted(written)
    assert all(folder.read_bytes(name) == name.encode() for name in written)
