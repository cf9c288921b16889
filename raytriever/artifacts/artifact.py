"""Artifacts: a folder of shards and the manifest that makes it complete.

``manifest.json`` is written last, so its presence means complete. It holds deterministic facts only. It records what
the artifact is derived from: configuration, fingerprints of inputs, algorithm version. It also lists the shards with
their hashes. Its own SHA-256 is the artifact's fingerprint. ``run.json`` beside it holds times and machines.

While an artifact is being made, ``building.json`` names its derivation. ``shards/<name>.json`` names each finished
shard and the digest of its derivation, so a restart makes only what is missing.

``checked.json`` records the bytes and the time of change that each local file had when its hash was last compared with
the manifest's. A file with the same two values is taken as whole. Any other file is hashed again.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.storage import (
    TEMPORARY_PREFIX,
    Folder,
    absolute,
    cache_folder,
    is_sha256,
    require_inside,
    sha256_of,
)
from raytriever.errors import UserError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
BUILDING = "building.json"
RUN = "run.json"
LOG = "log.jsonl"  # times and rates of long work; like run.json it is no part of what the artifact is
CHECKED = "checked.json"
TIMES = (RUN, LOG, CHECKED)  # no part of what the artifact is
BESIDE = (MANIFEST, *TIMES)  # the files of an artifact that its manifest doesn't list
RECORDS = "shards/"
_TELLING = ("kind", "stage")  # where these differ, so does all the rest
DERIVATION = "derivation"  # in a shard's record, not in the manifest, and so are
STAMPS = "stamps"  # bytes and times of its files as they were written


@dataclass(frozen=True)
class Derivation:
    """Everything that an artifact's bytes are a function of."""

    kind: str
    stage: str
    algorithm_version: int
    config: dict[str, Any]
    inputs: dict[str, str]

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all of it."""
        return hashlib.sha256(to_json(asdict(self))).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Dotted names of the fields that differ from ``other``, as stored, with both values; kinds come first."""
        mine, theirs = flattened(asdict(self)), flattened(other)
        lines = []
        for key in sorted(mine.keys() | theirs.keys(), key=lambda key: (key not in _TELLING, key)):
            before, now = theirs.get(key, "(absent)"), mine.get(key, "(absent)")
            if before != now:
                shorten = key.startswith("inputs.")
                lines.append(f"{key}: {_short(before, shorten)} there, {_short(now, shorten)} now")
        return lines


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(value: Any, is_fingerprint: bool) -> str:
    return str(value)[:12] if is_fingerprint else json.dumps(value)


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard, ``name`` relative to the artifact's folder.

    Raises ``ValueError`` for a name that leads out of the folder, and for a hash that is none.
    """

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        require_inside(self.name)
        if not is_sha256(self.sha256):
            raise ValueError(f"{self.name}: {self.sha256!r} is no SHA-256")


@dataclass(frozen=True)
class ShardRecord:
    """The record of a finished shard. It is deterministic, so it goes into the manifest unchanged.

    Raises ``ValueError`` for a name that could not be a file's.
    """

    name: str
    rows: int
    files: tuple[ShardFile, ...]
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_inside(self.name)

    @staticmethod
    def from_json(value: Any) -> "ShardRecord":
        """The inverse of ``dataclasses.asdict``; what a stored record says of its making is left out.

        Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what is no record.
        """
        parts: dict[str, Any] = {each.name: value[each.name] for each in fields(ShardRecord)}
        parts["files"] = tuple(ShardFile(**file) for file in parts["files"])
        return ShardRecord(**parts)


_MISSING, _DAMAGED = "is missing though its manifest lists it", "is damaged: its SHA-256 differs from the manifest's"
_MANIFEST = {"schema_version", "shards", "rows", "counts", "dropped", "facts"} | {
    each.name for each in fields(Derivation)
}


class Artifact:
    """A complete artifact, opened for reading.

    Raises ``UserError`` if the folder's manifest is missing, unreadable or of a later schema. Also if ``kind`` is given
    and the artifact is of another kind.
    """

    def __init__(self, uri: str, kind: str | None = None) -> None:
        self.folder = Folder(uri)
        try:
            text = self.folder.read_bytes(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(_absent(self.folder, kind)) from error
        try:
            self.manifest: dict[str, Any] = json.loads(text)
            schema = self.manifest.get("schema_version") if isinstance(self.manifest, dict) else None
            if isinstance(schema, int) and schema > SCHEMA_VERSION:  # before the rest, which may have another shape
                raise UserError(
                    f"{self.folder.uri} was written with schema {schema}, this version reads up to {SCHEMA_VERSION}."
                    " Update Raytriever."
                )
            if lacking := _MANIFEST - self.manifest.keys():
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
            self.shards = tuple(map(ShardRecord.from_json, self.manifest["shards"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{self.folder.describe(MANIFEST)} is damaged ({error}). Remove the folder and make it again."
            ) from error
        self.kind: str = self.manifest["kind"]
        if kind is not None and self.kind != kind:
            raise UserError(
                f"{self.folder.uri} holds an artifact of kind '{self.kind}', one of kind '{kind}' is needed."
            )
        self.fingerprint = hashlib.sha256(text).hexdigest()
        self._files = {file.name: file for shard in self.shards for file in shard.files}
        self._checked: dict[str, tuple[int, int]] | None = None

    @property
    def uri(self) -> str:
        """The folder's path or URI."""
        return self.folder.uri

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all files that its manifest lists."""
        return sum(file.bytes for file in self._files.values())

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration it was made with."""
        return dict(self.manifest["config"])

    def names(self, prefix: str = "", suffix: str = "") -> list[str]:
        """Names of its files, in shard order."""
        return [name for name in self._files if name.startswith(prefix) and name.endswith(suffix)]

    def listed(self, name: str) -> ShardFile:
        """The manifest's record of one of its files. Raises ``UserError`` where it has none of that name."""
        if name not in self._files:
            stage, version = (self.manifest[key] for key in ("stage", "algorithm_version"))
            raise UserError(
                f"{self.uri} has no {name} because another version of Raytriever made it (raytriever {stage},"
                f" algorithm version {version}). Run its recipe again, which makes it again, or run the job with"
                " --force."
            )
        return self._files[name]

    def path(self, name: str) -> Path:
        """A local path of one of its files (a cached copy where the artifact is in an object store), known to be whole.

        Raises ``UserError`` where the file is missing or damaged, or the artifact has no such file.
        """
        listed = self.listed(name)
        if self.folder.is_local:
            self._compare(name)
        try:
            return self.folder.local_path(name, listed.sha256)
        except FileNotFoundError as error:
            raise self._unfit(name, _MISSING) from error

    def local_folder(self) -> Path:
        """A local folder with its files: its own, or links to copies of those in an object store.

        Raises ``UserError`` as ``path``.
        """
        if self.folder.is_local:
            self.check()
            return Path(absolute(self.uri))
        folder = cache_folder() / "folders" / self.fingerprint
        for name in self.names():
            path, link = self.path(name), folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            # whoever else makes it at the same time; built outside of what is read as the artifact
            with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder.parent) as temporary:
                fresh = Path(temporary) / link.name
                fresh.symlink_to(path)
                fresh.replace(link)
        return folder

    def open(self, name: str) -> pa.NativeFile:
        """One of its files for random access, where it is stored; of a local one the bytes are known to be whole.

        Raises ``UserError`` as ``path``.
        """
        self.listed(name)
        return pa.OSFile(str(self.path(name))) if self.folder.is_local else self.folder.open_input(name)

    def read_json(self, name: str) -> Any:
        """One of its JSON files, parsed. Raises ``UserError`` as ``path``."""
        return json.loads(self.path(name).read_bytes())

    def run_facts(self) -> dict[str, Any]:
        """The contents of ``run.json``. Empty where it is absent, as in a copy."""
        return read_run(self.folder)

    def check(self) -> None:
        """Makes sure that every file exists and is whole. Files that changed since the last comparison are hashed.

        Files in an object store are compared by their sizes, because whoever reads one compares its hash. Raises
        ``UserError`` that names the file.
        """
        if self.folder.is_local:
            before = dict(self._stamps())
            for name in self._files:
                self._compare(name)
            if self._stamps() != before:
                write_stamps(self.folder, self._stamps())
            return
        stored = self.folder.files()
        for name, file in self._files.items():
            if name not in stored:
                raise self._unfit(name, _MISSING)
            if stored[name] != file.bytes:
                raise self._unfit(name, _DAMAGED)

    def verify(self) -> None:
        """Reads every file where it is stored and compares hashes. Raises ``UserError`` that names the damaged file."""
        for name in self._files:
            self._compare(name, read=True)
        write_stamps(self.folder, self._stamps())

    def _compare(self, name: str, *, read: bool = False) -> None:
        """Compares a file with the manifest by its hash, unless it has not changed since that was done.

        ``read``: whatever its time says. Raises ``UserError``.
        """
        try:
            stamp = self.folder.stamp(name)
            if not read and stamp is not None and self._stamps().get(name) == stamp:
                return
            found = self.folder.sha256(name)
        except FileNotFoundError as error:
            raise self._unfit(name, _MISSING) from error
        if found != self._files[name].sha256:
            raise self._unfit(name, _DAMAGED)
        if stamp is not None:
            self._stamps()[name] = stamp

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Each file's bytes and time of change at its last comparison."""
        if self._checked is None:
            self._checked = read_stamps(self.folder)
        return self._checked

    def _unfit(self, name: str, problem: str) -> UserError:
        return UserError(f"{self.folder.describe(name)} {problem}. Remove {self.uri} and make it again.")


def read_stamps(folder: Folder) -> dict[str, tuple[int, int]]:
    """The contents of ``checked.json``. Empty where it is absent or damaged, so every file is compared again."""
    with suppress(FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return {str(name): (size, changed) for name, (size, changed) in json.loads(folder.read_bytes(CHECKED)).items()}
    return {}


def write_stamps(folder: Folder, stamps: Mapping[str, tuple[int, int]]) -> None:
    """Writes ``checked.json``. In a read-only folder each process compares the files again."""
    if stamps:  # none of files in an object store
        with suppress(OSError):
            folder.write_bytes(CHECKED, to_json(stamps))


def read_run(folder: Folder) -> dict[str, Any]:
    """The contents of a folder's ``run.json``, empty if it is absent. Raises ``UserError`` if it is damaged."""
    try:
        found = json.loads(folder.read_bytes(RUN))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{folder.describe(RUN)} is damaged. It only records times and machines. Delete that file.")
    return found


def _absent(folder: Folder, kind: str | None) -> str:
    wanted = f"an artifact of kind '{kind}'" if kind else "an artifact"
    if folder.exists(BUILDING):
        return f"{folder.uri} is unfinished (no {MANIFEST}). Run its stage again, which resumes it."
    return f"{folder.uri} holds no artifact (no {MANIFEST}), {wanted} is needed. Is the path that of a stage?"


def is_artifact(uri: str) -> bool:
    """Whether the folder holds a complete artifact."""
    return Folder(uri).exists(MANIFEST)


class ShardWriter:
    """Collects the files of one shard and commits them: files first, then the record that makes the shard finished.

    ``derivation``: digest of the one that the shard is made by; without it, the next run makes the shard again.
    """

    def __init__(self, folder: Folder, name: str, scratch: Path, derivation: str = "") -> None:
        self._folder = folder
        self.name = name
        self._scratch = scratch
        self._derivation = derivation
        self._adopted: list[ShardFile] = []
        self._files: list[ShardFile] = []
        self._stamps: dict[str, tuple[int, int]] = {}

    def path(self, name: str) -> Path:
        """A local path to build the file at before ``add``. ``name`` may hold folders."""
        path = self._scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, name: str) -> None:
        """Puts the file built at ``path(name)`` into the artifact."""
        path = self.path(name)
        self._files.append(ShardFile(name, path.stat().st_size, sha256_of(path)))
        self._folder.put(name, path)
        if stamp := self._folder.stamp(name):
            self._stamps[name] = stamp

    def adopt(self, files: Sequence[ShardFile]) -> None:
        """Takes files of intermediate shards into this one: they stay when what those wrote is removed."""
        self._adopted += files
        self._stamps |= {file.name: stamp for file in files if (stamp := self._folder.stamp(file.name))}

    def add_bytes(self, name: str, data: bytes) -> None:
        """Puts a file of these bytes into the artifact."""
        self.path(name).write_bytes(data)
        self.add(name)

    def add_array(self, name: str, array: NDArray[Any]) -> None:
        """Puts an array into the artifact as ``.npy``."""
        np.save(self.path(name), array)
        self.add(name)

    def add_table(self, name: str, table: pa.Table, *, values_repeat: bool = True) -> None:
        """Puts a table into the artifact as parquet. Where no values repeat, dictionaries of them only take time."""
        pq.write_table(table, self.path(name), compression="zstd", use_dictionary=values_repeat)
        self.add(name)

    def add_json(self, name: str, value: Any) -> None:
        """Puts what ``to_strict_json`` writes into the artifact."""
        self.add_bytes(name, to_strict_json(value))

    def discard(self) -> None:
        """Removes the files added so far: of a shard that fails nothing stays."""
        for file in self._files:
            self._folder.delete(file.name)

    def read(self, name: str) -> bytes:
        """The files of a shard of an earlier phase."""
        return self._folder.read_bytes(name)

    def commit(
        self,
        rows: int = 0,
        *,
        counts: Mapping[str, int] | None = None,
        dropped: Mapping[str, int] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> ShardRecord:
        """Writes and returns the shard's record."""
        record = ShardRecord(
            self.name, rows, (*self._adopted, *self._files), dict(counts or {}), dict(dropped or {}), dict(facts or {})
        )
        stored = {**asdict(record), DERIVATION: self._derivation, STAMPS: self._stamps}
        self._folder.write_bytes(f"{RECORDS}{self.name}.json", to_json(stored))
        return record


def to_json(value: Any) -> bytes:
    """JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def to_strict_json(value: Any) -> bytes:
    """JSON that every parser reads, keys in their order: infinite numbers are strings that ``float`` takes back."""
    return (json.dumps(_without_infinities(value), indent=1, ensure_ascii=False) + "\n").encode()


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


# Whether artifacts belong together: what each was made from, by fingerprint.


def origin(artifact: Artifact, name: str) -> str | None:
    """Fingerprint of the input ``name`` that the artifact was made from, or of itself where it is of that kind."""
    if artifact.kind == name:
        return artifact.fingerprint
    found = artifact.manifest["inputs"].get(name) or artifact.manifest["facts"].get("origins", {}).get(name)
    return str(found) if found else None


def require_own_queries(collection: Artifact, run: Artifact) -> None:
    """Raises ``UserError`` if the run answers another collection's queries, because their ids may mean other texts."""
    asked = run.manifest["facts"].get("origins", {}).get("queries")
    if asked and asked != collection.fingerprint:
        raise UserError(
            f"{run.uri} answers the queries of another collection ({asked[:12]}), not those of {collection.uri}"
            f" ({collection.fingerprint[:12]}). Evaluate it with a qrels file, or search with this collection's"
            " queries."
        )


def require_same_origin(name: str, *artifacts: Artifact) -> str:
    """Fingerprint of the one ``name`` (a collection, pairs) that all artifacts come from.

    Row numbers mean nothing across collections. So anything else raises ``UserError`` naming the two that differ.
    """
    first = artifacts[0]
    expected = origin(first, name)
    if expected is None:
        raise UserError(f"{first.uri} doesn't record which {name} it comes from. Make it again from one.")
    for other in artifacts[1:]:
        found = origin(other, name) or "unknown"
        if found != expected:
            raise UserError(
                f"{first.uri} and {other.uri} don't come from the same {name} ({expected[:12]} against {found[:12]})."
                f" Make both from one {name}."
            )
    return expected
