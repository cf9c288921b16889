"""Folders on a local disk or in an object store behind one interface. A file is whole or absent.

Local: a file is written under a temporary name, synced and renamed. Object store: it is built locally and put to its
final key in one upload, never renamed. Both go through ``pyarrow.fs``; ``object_store`` opens URIs.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from raytriever.artifacts.object_store import open_object_store, refuse_keys
from raytriever.errors import StorageError, UserError, storage_error

# Names and hashes as manifests and records give them: others may have written them, and files are made under both.


def require_inside(name: object) -> None:
    """Raises ``ValueError`` unless it is a relative name with ``/`` between parts that doesn't leave its folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or any(character in str(name) for character in "\\\0"):
        raise ValueError(f"{name!r} is no name of a file inside the folder")


def is_sha256(text: object) -> bool:
    """Whether it is a SHA-256 in hexadecimal, and so can't be a path."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


TEMPORARY_PREFIX = ".tmp-"
_LONGEST_NAME = 255  # bytes
_COPY_BYTES = 8 << 20
_MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG}
_SHORT_WRITE = re.compile(r"requested and \d+ written")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_UMASK = os.umask(0o077)  # which can be asked for by setting it alone
os.umask(_UMASK)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Folder:
    """A folder named by a local path or a URI (``s3://bucket/prefix``, ``gs://…``, ``hf://datasets/owner/name@commit``).

    File names are relative, with ``/`` between parts. Raises ``UserError`` for a URI that can't be understood.
    """

    def __init__(self, uri: str | Path) -> None:
        if not isinstance(uri, str | Path) or uri == "":
            raise UserError(f"{uri!r:.60} names no folder. Give a path or a URI.")
        uri = _path_of(str(uri))
        self.uri = uri if uri.endswith("://") else uri.rstrip("/") or "/"
        refuse_keys(self.uri)
        self.is_local = "://" not in self.uri
        self.is_of_hub = self.uri.startswith("hf://")
        for part in self.uri.split("/"):
            if len(os.fsencode(part)) > _LONGEST_NAME:
                raise UserError(
                    f"The name {part[:40]}… has {len(part):,} letters. File systems allow {_LONGEST_NAME} bytes."
                    " Shorten it."
                )
        with self._named():
            local = fs.LocalFileSystem(), absolute(self.uri)
            self._filesystem, self._root = local if self.is_local else open_object_store(self.uri)
        self.is_local = isinstance(self._filesystem, fs.LocalFileSystem)  # so is the hub's mirror

    def __repr__(self) -> str:
        return f"Folder({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Folder, (self.uri,))

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.uri}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def describe(self, name: str) -> str:
        """The file's full path or URI, for messages."""
        return f"{self.uri}/{name}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turns errors and refusals of an object store into a ``StorageError`` with the folder's URI."""
        try:
            yield
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:  # the names of the errors in the hub's library change with its versions
            is_answer = self.is_of_hub or (type(error) is OSError and error.errno is None)
            if self.is_local or not is_answer:
                raise
            raise storage_error(self.uri, error) from error

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        try:
            with self._named():
                return bool(self._filesystem.get_file_info(self._key(name)).type == fs.FileType.File)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False  # nor could it be
            raise

    def files(self) -> dict[str, int]:
        """Name to bytes of every finished file below the folder, by name; empty where there is no such folder.

        Raises ``StorageError`` where it is a file.
        """
        self.refuse_file()
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        with self._named():
            found = self._filesystem.get_file_info(selector)
        infos = [info for info in found if info.type == fs.FileType.File]
        start = len(self._root) + 1
        names = {info.path[start:]: info.size for info in sorted(infos, key=lambda info: info.path)}
        return {name: size for name, size in names.items() if not name.startswith(TEMPORARY_PREFIX)}

    def refuse_file(self) -> None:
        """Raises ``StorageError`` where a file stands at a local folder's path or above it."""
        root = Path(self._root)
        for path in (root, *root.parents) if self.is_local else ():
            if path.exists() and not path.is_dir():
                raise StorageError(
                    f"{path} is a file, where {self.uri} would be a folder. Name its folder, or another one."
                )

    def refuse_links(self) -> None:
        """Raises ``UserError`` for a link anywhere below a local folder, because its target belongs to somebody else.

        Called before files are removed. The folder itself may be reached by a link.
        """
        for parent, folders, files in os.walk(self._root) if self.is_local else ():
            for path in (Path(parent) / name for name in (*folders, *files)):
                if path.is_symlink():
                    raise UserError(
                        f"{path} is a link (to {path.readlink()}). An artifact's folder can't hold links because"
                        " their targets would be removed with the artifact. Nothing was changed. Remove the link,"
                        " or choose another output."
                    )

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Bytes and time of the last change (ns) of a local file; None in an object store.

        Raises ``FileNotFoundError`` where there is no such file.
        """
        if not self.is_local:
            return None
        found = self._regular(name).stat()
        return found.st_size, found.st_mtime_ns

    def _regular(self, name: str) -> Path:
        """The local file. Raises ``FileNotFoundError``, also for a pipe, because its reader would wait for ever."""
        path = Path(self._key(name))
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path

    def read_bytes(self, name: str) -> bytes:
        """The file's bytes. Raises ``FileNotFoundError``."""
        with self._named(), self._open_stream(name) as stream:
            return bytes(stream.read())

    def _open_stream(self, name: str) -> pa.NativeFile:
        if self.is_local:
            self._regular(name)
        return self._filesystem.open_input_stream(self._key(name), compression=None)

    def open_input(self, name: str) -> pa.NativeFile:
        """The file for random access. Raises ``FileNotFoundError``."""
        if self.is_local:
            self._regular(name)
        with self._named():
            return self._filesystem.open_input_file(self._key(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a whole file atomically."""
        with self.scratch() as scratch:
            path = scratch / "bytes"
            path.write_bytes(data)
            self.put(name, path)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary local folder to build files in, on the same file system where the folder is local."""
        parent = None
        if self.is_local:
            parent = Path(self._root)
            try:
                parent.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # with its parents made, a place where nobody makes folders: /proc
                raise storage_error(self.uri, "no folder can be made there") from error
        with nullcontext() if self.is_local else _named_if_full(Path(tempfile.gettempdir()), "TMPDIR"):
            path = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def put(self, name: str, source: Path) -> None:
        """Moves the finished local file ``source`` here, so that it appears under ``name`` whole or not at all."""
        if self.is_local:
            target = Path(self._key(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            source.chmod(0o666 & ~_UMASK)  # as any other file; some libraries write files for their owner alone
            with source.open("rb") as file:
                os.fsync(file.fileno())
            source.replace(target)
            _sync_folder(target.parent)
            return
        with (
            self._named(),
            pa.memory_map(str(source)) as file,
            self._filesystem.open_output_stream(self._key(name), compression=None) as stream,
        ):
            # one call: closing after an interrupt between two would keep the first
            stream.write(file.read_buffer())
        source.unlink()

    def local_path(self, name: str, sha256: str) -> Path:
        """A local path that holds the file: itself, or a copy in the cache, keyed and checked by its hash.

        Raises ``FileNotFoundError``, and ``UserError`` where the downloaded bytes don't have that hash, where it is
        none, and where the cache's disk is full.
        """
        if not is_sha256(sha256):
            raise UserError(
                f"{self.describe(name)} is recorded with the SHA-256 {sha256!r}. A SHA-256 is 64 of 0-9 and a-f,"
                " so the record is damaged or forged. Make the artifact again."
            )
        if self.is_local:
            return self._regular(name)
        cached = cache_folder() / "files" / sha256
        if not cached.exists():
            with _named_if_full(cached.parent, "RAYTRIEVER_CACHE"):
                cached.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=cached.parent) as temporary:
                    self._download(name, sha256, Path(temporary) / sha256).replace(cached)
            _sync_folder(cached.parent)
        return cached

    def _download(self, name: str, sha256: str, copy: Path) -> Path:
        """Returns ``copy``, now holding the checked file on the disk. From then on its name vouches for its bytes."""
        with self._named(), copy.open("wb") as file, self._open_stream(name) as stream:
            shutil.copyfileobj(stream, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        if sha256_of(copy) != sha256:
            raise UserError(f"{self.describe(name)} is damaged: its SHA-256 is not the recorded {sha256}.")
        return copy

    def sha256(self, name: str) -> str:
        """Hexadecimal SHA-256 of the bytes that are stored now. Raises ``FileNotFoundError``."""
        found = hashlib.sha256()
        with self._named(), self._open_stream(name) as stream:
            while block := stream.read(_COPY_BYTES):
                found.update(block)
        return found.hexdigest()

    def delete(self, name: str) -> None:
        """Removes one file; no error where it is absent."""
        if self.exists(name):
            with self._named():
                self._filesystem.delete_file(self._key(name))

    def delete_temporary(self) -> None:
        """Removes what killed writers left behind."""
        for parent, folders, _ in os.walk(self._root) if self.is_local else ():
            for name in folders:
                if name.startswith(TEMPORARY_PREFIX):
                    shutil.rmtree(Path(parent) / name, ignore_errors=True)

    def delete_empty_folders(self) -> None:
        """Removes local subfolders without files (an object store has none)."""
        for parent, _, _ in os.walk(self._root, topdown=False) if self.is_local else ():
            if parent != self._root and not any(Path(parent).iterdir()):
                Path(parent).rmdir()


def absolute(uri: str) -> str:
    """A local path, or a URI of one, made absolute; other URIs as they are."""
    uri = _path_of(uri)
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


def _path_of(uri: str) -> str:
    """The path of a ``file:///`` URI; anything else as it is."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file:///") else uri


def folder_and_name(path: str) -> tuple[Folder, str]:
    """Where a file is."""
    folder, _, name = absolute(path).rpartition("/")
    return Folder(folder or "/"), name


def cache_folder() -> Path:
    """The folder of local copies: ``RAYTRIEVER_CACHE``, else ``~/.cache/raytriever``."""
    return Path(absolute(os.environ.get("RAYTRIEVER_CACHE") or "~/.cache/raytriever"))


@contextmanager
def _named_if_full(folder: Path, variable: str) -> Iterator[None]:
    """Explains that the local ``folder``, not the store, is full or forbidden, and which variable moves it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        named = Path(str(getattr(error, "filename", None) or folder))
        is_there = named.is_relative_to(folder) or folder.is_relative_to(named)
        problem = _problem(error)
        if not is_there or not any(os.strerror(number) in problem for number in _DISK_ERRORS):
            raise
        raise storage_error(
            str(folder),
            f"{problem}. That is this machine's own disk; set {variable} in the environment to another folder",
        ) from error


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def storage_errors(output: str) -> Iterator[None]:
    """Turns a full or forbidden disk, or an object store that refuses, into a ``StorageError`` that says which one."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _is_of_storage(error):
            raise
        where = getattr(error, "filename", None) or output
        raise storage_error(where, _problem(error)) from error


def _problem(error: Exception) -> str:
    """In words; of a short write, NumPy says only how much was written."""
    if _SHORT_WRITE.search(str(error)):
        return f"{os.strerror(errno.ENOSPC)}, or a limit is reached ({error})"
    return str(getattr(error, "strerror", None) or error)


def _is_of_storage(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _MENDABLE:
        return True
    if type(error) is OSError and error.errno is None:
        return True  # an object store's answer, or NumPy's short write
    return os.strerror(errno.ENOSPC) in str(error)  # libraries in other languages have errors of their own
