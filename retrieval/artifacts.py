"""Artifacts: a folder of shards and the manifest that makes it complete.

``manifest.json`` is written last, so its presence means complete. It holds deterministic facts only: what the
artifact is derived from (configuration, fingerprints of inputs, algorithm version) and what it consists of (shards
with their hashes). Its own SHA-256 is the artifact's fingerprint. ``run.json`` beside it holds times and machines.

While an artifact is being made, ``building.json`` names its derivation and ``shards/<name>.json`` each finished shard,
so that a restart makes only what is missing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder, sha256_of

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
BUILDING = "building.json"
RUN = "run.json"
LOG = "log.jsonl"  # times and rates of long work; like run.json it is no part of what the artifact is
_RECORDS = "shards/"


@dataclass(frozen=True)
class Derivation:
    """Everything that an artifact's bytes are a function of."""

    kind: str
    stage: str
    algorithm_version: int
    config: dict[str, Any]
    inputs: dict[str, str]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Dotted names of the fields in which the stored derivation ``other`` differs, with both values."""
        mine, theirs = _flatten(asdict(self)), _flatten(other)
        lines = []
        for key in sorted(mine.keys() | theirs.keys()):
            before, now = theirs.get(key, "(absent)"), mine.get(key, "(absent)")
            if before != now:
                shorten = key.startswith("inputs.")
                lines.append(f"{key}: {_short(before, shorten)} there, {_short(now, shorten)} now")
        return lines


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(value: Any, is_fingerprint: bool) -> str:
    return str(value)[:12] if is_fingerprint else json.dumps(value)


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard, ``name`` relative to the artifact's folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard says of itself: deterministic, so it goes into the manifest as it is."""

    name: str
    rows: int
    files: tuple[ShardFile, ...]
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ShardRecord":
        """The inverse of ``dataclasses.asdict``."""
        files = tuple(ShardFile(**item) for item in value["files"])
        return ShardRecord(**{**value, "files": files})


class Artifact:
    """A complete artifact, opened for reading.

    Raises ``UserError`` where the folder has no manifest, an unreadable one, one of a later schema, or where ``kind``
    is given and the artifact is another one.
    """

    def __init__(self, uri: str, kind: str | None = None) -> None:
        self.folder = Folder(uri)
        try:
            text = self.folder.read_bytes(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(_absent(self.folder, kind)) from error
        try:
            self.manifest: dict[str, Any] = json.loads(text)
            self.kind: str = self.manifest["kind"]
            self.shards = tuple(ShardRecord.from_json(shard) for shard in self.manifest["shards"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder.describe(MANIFEST)} is damaged ({error}). Remove the folder and make it again."
            ) from error
        if self.manifest["schema_version"] > SCHEMA_VERSION:
            raise UserError(
                f"{self.folder.uri} was written with schema {self.manifest['schema_version']}, this version reads up to"
                f" {SCHEMA_VERSION}. Update Raytriever."
            )
        if kind is not None and self.kind != kind:
            raise UserError(f"{self.folder.uri} holds an artifact of kind '{self.kind}', one of kind '{kind}' is needed.")
        self.fingerprint = hashlib.sha256(text).hexdigest()
        self._hashes = {file.name: file.sha256 for shard in self.shards for file in shard.files}

    @property
    def uri(self) -> str:
        """The folder's path or URI."""
        return self.folder.uri

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration it was made with."""
        return dict(self.manifest["config"])

    def names(self, prefix: str = "", suffix: str = "") -> list[str]:
        """Names of its files, in shard order."""
        return [name for name in self._hashes if name.startswith(prefix) and name.endswith(suffix)]

    def path(self, name: str) -> Path:
        """A local path of one of its files (a cached, checked copy where the artifact is in an object store).

        Raises ``UserError`` where the file has gone missing.
        """
        path = self.folder.local_path(name, self._hashes[name])
        if not path.exists():
            raise UserError(f"{self.folder.describe(name)} is missing though its manifest lists it. Make {self.uri} again.")
        return path

    def read_json(self, name: str) -> Any:
        """One of its JSON files, parsed."""
        return json.loads(self.folder.read_bytes(name))

    def verify(self) -> None:
        """Reads every file and compares hashes. Raises ``UserError`` that names the damaged file."""
        for name, expected in self._hashes.items():
            if sha256_of(self.path(name)) != expected:
                raise UserError(f"{self.folder.describe(name)} is damaged: its SHA-256 differs from the manifest's.")


def _absent(folder: Folder, kind: str | None) -> str:
    wanted = f"an artifact of kind '{kind}'" if kind else "an artifact"
    if folder.exists(BUILDING):
        return f"{folder.uri} is unfinished (no {MANIFEST}): run the stage that makes it again, it goes on where it was."
    return f"{folder.uri} holds no artifact (no {MANIFEST}), {wanted} is needed. Is the path right?"


def is_artifact(uri: str) -> bool:
    """Whether the folder holds a complete artifact."""
    return Folder(uri).exists(MANIFEST)


class ArtifactWriter:
    """Makes one artifact, going on from what an interrupted run of the same derivation left.

    ``complete`` is True where the artifact is already there. Raises ``UserError`` where the folder holds another
    artifact and ``replace`` is off, naming the fields that differ, and where it holds something that is no artifact.
    """

    def __init__(self, uri: str, derivation: Derivation, *, replace: bool = False) -> None:
        self.folder = Folder(uri)
        self.derivation = derivation
        self._replace = replace
        self._stale = False
        self.complete = False
        stored = self._stored()
        if stored is None:
            self._refuse_foreign_files()
            return
        differences = derivation.differences({key: stored.get(key) for key in asdict(derivation)})
        if differences and not replace:
            raise UserError(
                f"{uri} holds a different {stored.get('kind')} artifact: {'; '.join(differences)}. Choose another output,"
                " or --force to replace it."
            )
        self._stale = bool(differences)
        self.complete = not differences and self.folder.exists(MANIFEST)

    def _stored(self) -> dict[str, Any] | None:
        for name in (MANIFEST, BUILDING):
            if self.folder.exists(name):
                try:
                    value = json.loads(self.folder.read_bytes(name))
                    return {key: value[key] for key in ("kind", "stage", "algorithm_version", "config", "inputs")}
                except (ValueError, KeyError, TypeError) as error:
                    if not self._replace:
                        raise UserError(
                            f"{self.folder.describe(name)} is damaged. --force makes the artifact again."
                        ) from error
                    return {}
        return None

    def _refuse_foreign_files(self) -> None:
        names = list(self.folder.files())
        if names:
            raise UserError(
                f"{self.folder.uri} is no artifact but holds files ({names[0]}{', …' if len(names) > 1 else ''})."
                " Nothing was touched: choose an empty or a new folder as output."
            )

    def begin(self) -> dict[str, ShardRecord]:
        """Makes the folder ready and returns the shards that are already finished, by name."""
        if self._stale:
            self.folder.delete_everything()
        self.folder.delete_temporary()
        if not self.folder.exists(BUILDING):
            self.folder.write_bytes(BUILDING, _json(asdict(self.derivation)))
        finished = {}
        for name in self.folder.files():
            if name.startswith(_RECORDS) and name.endswith(".json"):
                record = ShardRecord.from_json(json.loads(self.folder.read_bytes(name)))
                finished[record.name] = record
        return finished

    def finish(self, shards: list[ShardRecord], facts: Mapping[str, Any], run: Mapping[str, Any]) -> Artifact:
        """Writes ``run.json`` and, last, the manifest over ``shards`` (in their given order); tidies up."""
        manifest = {
            "schema_version": SCHEMA_VERSION,
            **asdict(self.derivation),
            "rows": sum(shard.rows for shard in shards),
            "counts": _sum([shard.counts for shard in shards]),
            "dropped": _sum([shard.dropped for shard in shards]),
            "facts": dict(facts),
            "shards": [asdict(shard) for shard in shards],
        }
        self.folder.write_bytes(RUN, _json(run))
        self.folder.write_bytes(MANIFEST, _json(manifest))
        self.sweep()
        return Artifact(self.folder.uri)

    def sweep(self) -> None:
        """Removes what a finished artifact doesn't need; a kill between the manifest and this leaves it to the next run."""
        listed = {MANIFEST, RUN, LOG, *Artifact(self.folder.uri).names()}
        for name in self.folder.files():
            if name not in listed:
                self.folder.delete(name)
        self.folder.delete_empty_folders()


class ShardWriter:
    """Collects the files of one shard and commits them: files first, then the record that makes the shard finished."""

    def __init__(self, folder: Folder, name: str, scratch: Path) -> None:
        self._folder = folder
        self._name = name
        self._scratch = scratch
        self._files: list[ShardFile] = []

    def path(self, name: str) -> Path:
        """Where to build the file locally before ``add``; ``name`` may hold folders."""
        path = self._scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, name: str) -> None:
        """Puts the file built at ``path(name)`` into the artifact."""
        path = self.path(name)
        self._files.append(ShardFile(name, path.stat().st_size, sha256_of(path)))
        self._folder.put(name, path)

    def read(self, name: str) -> bytes:
        """What a shard of an earlier phase wrote."""
        return self._folder.read_bytes(name)

    def commit(
        self,
        rows: int,
        *,
        counts: Mapping[str, int] | None = None,
        dropped: Mapping[str, int] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> ShardRecord:
        """Writes and returns the shard's record."""
        record = ShardRecord(
            self._name, rows, tuple(self._files), dict(counts or {}), dict(dropped or {}), dict(facts or {})
        )
        self._folder.write_bytes(f"{_RECORDS}{self._name}.json", _json(asdict(record)))
        return record


def _sum(counters: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counter in counters:
        for name, count in counter.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
