"""Folders: a file is whole or absent, on the local disk and in an object store."""

import errno
import hashlib
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytriever.artifacts.storage import TEMPORARY_PREFIX, Folder, absolute, cache_folder, folder_and_name, sha256_of
from raytriever.errors import StorageError, UserError


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything_in(folder: Path) -> list[str]:
    """Names below a local folder, temporary ones too."""
    return sorted(path.name for path in folder.rglob("*"))


def put(folder: Folder, name: str, data: bytes) -> None:
    with folder.scratch() as scratch:
        (scratch / "built").write_bytes(data)
        folder.put(name, scratch / "built")
        assert not (scratch / "built").exists()


def test_what_is_written_is_read(place: str) -> None:
    folder = Folder(place)
    assert folder.files() == {}
    assert not folder.exists("a/b.txt")
    written = {"a/b.txt": b"one", "a/c/d.txt": b"", "é ü.bin": bytes(range(256)), "z": b"last", "x.gz": b"as it is"}
    folder.write_bytes("z", b"a longer first version")  # which the next one replaces
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
    for read in (folder.read_bytes, folder.sha256, folder.open_input, lambda name: folder.local_path(name, "0" * 64)):
        with pytest.raises(FileNotFoundError):
            read("absent")
    for name in ("absent", "a/b.txt", "z"):
        folder.delete(name)
    folder.delete_empty_folders()
    assert list(folder.files()) == ["a/c/d.txt", "x.gz", "é ü.bin"]
    for name in folder.files():
        folder.delete(name)
    folder.delete_empty_folders()
    assert not folder.is_local or everything_in(Path(place)) == []
    assert not folder.is_local or Path(place).is_dir()  # it stays itself


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Its reader would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    folder = Folder(str(tmp_path))
    for read in (folder.read_bytes, folder.open_input, folder.stamp, lambda name: folder.local_path(name, "0" * 64)):
        with pytest.raises(FileNotFoundError):
            read("pipe")


def test_names_may_be_too_long(tmp_path: Path) -> None:
    assert not Folder(str(tmp_path)).exists("a" * 5_000)
    with pytest.raises(UserError, match=r"The name x{40}… has 5,000 letters"):
        Folder(f"runs/{'x' * 5000}/made")


def test_a_file_larger_than_an_upload_part_arrives_whole(place: str) -> None:
    data = os.urandom(1 << 20) * 12
    put(Folder(place), "large", data)
    assert Folder(place).sha256("large") == sha256(data)


def test_a_folder_below_is_a_folder(place: str) -> None:
    below = Folder(place + "/") / "one" / "two"
    below.write_bytes("x", b"1")
    assert Folder(place).read_bytes("one/two/x") == b"1"
    assert below.describe("x") == f"{place}/one/two/x"
    assert pickle.loads(pickle.dumps(below)).read_bytes("x") == b"1"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", [KeyboardInterrupt, ValueError, OSError, (os, "fsync"), (Path, "replace")], ids=str)
def test_a_writer_or_a_disk_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch, failing: Any) -> None:
    folder = Folder(str(tmp_path / "f"))
    folder.write_bytes("name", b"before")
    of_disk = isinstance(failing, tuple)

    def write() -> None:
        with folder.scratch() as scratch:
            (scratch / "half").write_bytes(b"half of it")
            if not of_disk:
                raise failing
            folder.put("name", scratch / "half")

    with monkeypatch.context() as patch:
        if of_disk:
            patch.setattr(*failing, full)
        with pytest.raises(OSError if of_disk else failing):
            write()
    assert everything_in(tmp_path / "f") == ["name"]
    assert folder.read_bytes("name") == b"before"


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, object_store: str, monkeypatch) -> None:
    """Of a copy too, whose name vouches for the bytes ever after."""
    remote = Folder(f"{object_store}/synced")
    remote.write_bytes("name", b"to be synced")
    events: list[str] = []
    synced, moved = os.fsync, Path.replace

    def sync(handle: int) -> None:
        found = os.fstat(handle)
        events.append(f"sync {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "sync")
        synced(handle)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("rename"), moved(path, to)))
    Folder(str(tmp_path)).write_bytes("name", b"x")
    assert events == ["sync 1 bytes", "rename", "sync"]  # the file, its name, the folder that holds the name
    events.clear()
    remote.local_path("name", sha256(b"to be synced"))
    assert events == ["sync 12 bytes", "rename", "sync"]


def test_temporary_files_are_invisible_and_swept(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write_bytes("kept", b"x")
    with folder.scratch() as scratch:
        assert scratch.parent == tmp_path  # a rename must not cross file systems
        (scratch / "deep").mkdir()
        (scratch / "deep" / "half").write_bytes(b"x")
        assert list(folder.files()) == ["kept"]
    with folder.scratch() as scratch:
        scratch.rmdir()  # no error where somebody else has removed it
    left_by_a_kill = tmp_path / f"{TEMPORARY_PREFIX}abc"
    left_by_a_kill.mkdir()
    (left_by_a_kill / "half").write_bytes(b"x")
    assert list(folder.files()) == ["kept"]
    folder.delete_temporary()
    assert everything_in(tmp_path) == ["kept"]


def test_what_slashes_and_files_in_the_place_of_folders_mean(
    object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Folder(f"{object_store}/a").write_bytes("b/name", b"x")
    assert list(Folder(f"{object_store}//a///b//").files()) == ["name"]
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/below"):
        with pytest.raises(UserError, match=rf"file is a file, where .*{path} would be a folder"):
            Folder(str(tmp_path / path)).files()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYTRIEVER_CACHE", "cache")
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("RAYTRIEVER_CACHE", "~/cache")
    assert cache_folder() == Path.home() / "cache"


def test_a_remote_file_is_copied_once_and_checked(object_store: str, cache: Path, tmp_path: Path) -> None:
    folder, digest = Folder(f"{object_store}/copied"), sha256(b"the bytes")
    folder.write_bytes("name", b"the bytes")
    path = folder.local_path("name", digest)
    assert path == cache_folder() / "files" / digest
    assert path.read_bytes() == b"the bytes"
    assert sha256_of(path) == digest
    assert path.is_relative_to(cache)
    folder.delete("name")
    assert folder.local_path("name", digest) == path
    Folder(str(tmp_path)).write_bytes("name", b"x")  # a local one needs no copy
    assert Folder(str(tmp_path)).local_path("name", "0" * 64) == tmp_path / "name"

    folder.write_bytes("name", b"other bytes")
    expected = sha256(b"the bytes that were meant")
    message = f"{object_store}/copied/name is damaged: its SHA-256 is not the recorded {expected}"
    with pytest.raises(UserError, match=message):
        folder.local_path("name", expected)
    assert not (cache_folder() / "files" / expected).exists()
    assert not list((cache_folder() / "files").glob(f"{TEMPORARY_PREFIX}*"))


def test_a_cache_is_made_where_none_is_yet(object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRIEVER_CACHE", str(tmp_path / "home" / "cache"))
    folder = Folder(f"{object_store}/cached")
    folder.write_bytes("name", b"the bytes")
    assert folder.local_path("name", sha256(b"the bytes")).read_bytes() == b"the bytes"


@pytest.mark.parametrize("recorded", ["../../.bashrc", "/tmp/x", "0" * 63, "A" * 64, "0" * 64 + "\n", "", None])
def test_a_hash_that_is_none_names_no_file(place: str, cache: Path, recorded: Any) -> None:
    folder = Folder(place)
    folder.write_bytes("name", b"evil")
    (cache / "files").mkdir(exist_ok=True)
    (cache.parent / ".bashrc").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"recorded with the SHA-256 .*, so the record is damaged or forged"):
        folder.local_path("name", recorded)
    assert (cache.parent / ".bashrc").read_bytes() == b"mine"


def test_a_full_disk_of_the_cache_is_named_and_not_the_store(object_store: str, cache: Path, monkeypatch) -> None:
    folder = Folder(f"{object_store}/large")
    folder.write_bytes("name", b"larger than the disk")
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(StorageError) as raised:
        folder.local_path("name", sha256(b"larger than the disk"))
    assert str(raised.value).startswith(f"{cache / 'files'}: No space left on device. ")
    assert "RAYTRIEVER_CACHE" in str(raised.value)
    assert object_store not in str(raised.value)


@pytest.mark.parametrize("where", ["mkdtemp", "inside", "below", "above", "library", "numpy"])
def test_a_full_disk_for_scratch_is_named_and_not_the_store(object_store: str, tmp_path: Path, monkeypatch, where: str):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if where == "mkdtemp":
        monkeypatch.setattr("tempfile.mkdtemp", lambda **_: full())

    def work() -> None:
        with Folder(f"{object_store}/scratch").scratch():
            if where == "library":
                raise RuntimeError("I/O error: No space left on device (os error 28)")
            if where == "numpy":
                raise OSError("230400 requested and 153536 written")
            if where in ("below", "above"):
                name = tmp_path / "x" if where == "below" else tmp_path.parent
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))
            full()

    with pytest.raises(StorageError, match=rf"^{tmp_path}: .*No space left on device.*TMPDIR") as raised:
        work()
    assert object_store not in str(raised.value)


def test_a_full_disk_elsewhere_is_not_the_one_for_scratch(object_store: str) -> None:
    elsewhere = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/x")
    with pytest.raises(OSError, match="/elsewhere/x") as raised, Folder(f"{object_store}/scratch").scratch():
        raise elsewhere
    assert raised.value is elsewhere


KEYS = [
    "s3://key:secret@bucket", "s3://key:secret@bucket/runs", "s3://key:sec/ret@bucket/runs",
    "s3://key:secret@bucket/runs?region=y", "s3://key:sec?ret@bucket/runs", "s3://key:sec#ret@bucket/runs",
    "gs://anonymous@key:secret@bucket/runs", "nonsense://key:sec/ret@bucket",
]  # fmt: skip
NO_FOLDERS = ["file://", "file://host/x", "ftp://host/x", "s3://", "s3:///x", "gs://", "gs://anonymous@"]
NO_FOLDERS += ["nonsense://x", "mock://"]


@pytest.mark.parametrize(("uri", "said"), [
    *((uri, "AWS_SECRET_ACCESS_KEY") for uri in KEYS),
    *((uri, r"can't be opened as a folder: .* Use a local path, s3://") for uri in NO_FOLDERS),
    *((uri, f"{uri!r} names no folder. Give a path or a URI") for uri in ("", None, 3)),
    ("/tmp/" + 128 * "ü", "has 128 letters. File systems allow 255 bytes"),
    ("s3://bucket/x?region=y", r"s3://bucket/x\?region=y has options.*environment \(AWS_REGION"),
])  # fmt: skip
def test_a_uri_that_is_no_folders_is_refused_and_keys_in_it_are_not_shown(uri: Any, said: str) -> None:
    Folder("/tmp/" + 255 * "a")
    with pytest.raises(UserError, match=said) as refused:
        Folder(uri)
    assert not any(part in str(refused.value) for part in ("key:", "sec", "ret@"))


def test_names_in_a_store_are_taken_as_they_are(object_store: str) -> None:
    """One that was cut off at a ``#``, say, would be another run's folder."""
    names = ["run#1/a", "run#2/a", "a b", "a%20b", "50%", "über", "[a]", "a|b", "x\\y", "a+b", "a&b=c;d", "{a}^`~<>"]
    for number, name in enumerate(names):
        Folder(f"{object_store}/odd/{name}").write_bytes("x", str(number).encode())
    assert Folder(f"{object_store}/odd").files().keys() == {f"{name}/x" for name in names}
    for number, name in enumerate(names):
        folder = Folder(f"{object_store}/odd/{name}")
        assert folder.files() == {"x": len(str(number))}
        assert pickle.loads(pickle.dumps(folder)).read_bytes("x") == str(number).encode()
        with folder.open_input("x") as file:
            assert file.read() == str(number).encode()
        folder.delete("x")
    assert Folder(f"{object_store}/odd").files() == {}
    public = Folder("gs://anonymous@bucket/a#b c%20/ü")  # which is no key
    assert (public.uri, public._root) == ("gs://anonymous@bucket/a#b c%20/ü", "bucket/a#b c%20/ü")


def test_local_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert absolute("a/b") == str(tmp_path / "a/b")
    assert absolute("~/a") == "/home/someone/a"
    assert absolute("s3://bucket/a") == "s3://bucket/a"
    assert absolute("file:///a/b%20c") == "/a/b c"
    assert folder_and_name("/x")[0].uri == "/"
    monkeypatch.delenv("RAYTRIEVER_CACHE")
    assert cache_folder() == Path("/home/someone/.cache/raytriever")
    Folder("relative").write_bytes("x", b"1")
    assert (tmp_path / "relative" / "x").read_bytes() == b"1"
    assert Folder(f"file://{tmp_path}/relative").read_bytes("x") == b"1"


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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_place_where_no_folder_can_be_made_is_named() -> None:
    with pytest.raises(StorageError, match="/proc/model: no folder can be made there"):
        Folder("/proc/model").write_bytes("name", b"data")
