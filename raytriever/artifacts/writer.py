"""Making an artifact: going on where an interrupted run stopped, refusing what is another's, the manifest last."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from raytriever.artifacts.artifact import (
    BUILDING,
    DERIVATION,
    LOG,
    MANIFEST,
    RECORDS,
    RUN,
    SCHEMA_VERSION,
    Artifact,
    Derivation,
    ShardRecord,
    to_json,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import StorageError, UserError
from raytriever.settings.configuration import Settings

LOCK = "lock.json"


class Lock(Settings):
    """What ``lock.json`` in a folder says of the run that makes its artifact: one at a time may."""

    run: str
    """Drawn at random."""
    host: str
    """Name of its machine."""
    process: int
    """Number of its process."""
    started: str
    """When that process started, in the system's ticks; another one may have its number by now."""
    since: str
    """When it took the lock, for people."""

    @classmethod
    def of_this_process(cls) -> Self:
        """A new one."""
        return cls(
            run=secrets.token_hex(8),
            host=socket.gethostname(),
            process=os.getpid(),
            started=_started(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def _started(process: int) -> str:
    """When a running process started, in the system's ticks; '' where there is none, or the system doesn't say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = fields[0], fields[19]
    return "" if state in "ZX" else started  # dead, though not yet gone


def _stored_lock(folder: Folder) -> Lock | None:
    try:
        return Lock.model_validate_json(folder.read_bytes(LOCK))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextmanager
def locked(folder: Folder, *, force: bool = False) -> Iterator[None]:
    """Holds the folder's lock, so that no other run makes the artifact meanwhile.

    A lock that a killed run of this machine has left is taken over. Raises ``UserError`` where a running process of
    this machine holds it, and where one of another machine does, of which nobody knows, unless ``force`` is set. Of two
    runs that begin at one moment in an object store, which has no locks, the later one may win.
    """
    own = Lock.of_this_process()
    if not folder.create(LOCK, to_json(own.model_dump())):
        _require_abandoned(folder, force)
        folder.delete(LOCK)
        folder.create(LOCK, to_json(own.model_dump()))
    found = _stored_lock(folder)
    if found is not None and found.run != own.run:
        raise UserError(f"{folder.uri} is being made already, by {found}. {_WAIT}")
    try:
        yield
    finally:
        with suppress(OSError, StorageError):  # of what ends the run, that is the lesser trouble
            if _stored_lock(folder) == own:
                folder.delete(LOCK)


_WAIT = "Wait for it, stop it, or choose another output."


def _require_abandoned(folder: Folder, force: bool) -> None:
    other = _stored_lock(folder)
    if other is None or other.process == os.getpid():
        return
    if other.host != socket.gethostname():
        if not force:
            raise UserError(
                f"{folder.uri} is being made by {other}, as far as this machine knows. Wait for it, or choose another"
                f" output. If that run has ended, run again with --force, or delete {folder.describe(LOCK)}."
            )
    elif other.started and _started(other.process) == other.started:
        raise UserError(f"{folder.uri} is being made already, by {other}. {_WAIT}")


_SHOWN = 5  # differences, in an error


class ArtifactWriter:
    """Makes one artifact, going on from what an interrupted run of the same derivation left.

    ``complete`` is True where the artifact is already there. Raises ``UserError`` where the folder holds another
    artifact (or part of one) and ``replace`` is off, naming the fields that differ, and where it holds something that
    is no artifact.
    """

    def __init__(self, uri: str, derivation: Derivation, *, replace: bool = False) -> None:
        self.folder = Folder(uri)
        self.derivation = derivation
        self.complete = False
        self.differences: list[str] = []  # of another derivation, whose files are there and will be replaced
        self._stale: dict[str, Any] | None = None  # another derivation, whose files go first
        stored = self._stored()
        files = self.folder.files()
        if stored is None:
            self._refuse_foreign([name for name in files if name != LOCK])
            return
        differences = derivation.differences(stored)
        if differences and not replace and files.keys() - {BUILDING, LOCK}:
            raise UserError(
                f"{uri} holds a different {stored['kind']} artifact: {'; '.join(differences[:_SHOWN])}"
                f"{f'; and {len(differences) - _SHOWN} more' if len(differences) > _SHOWN else ''}. Choose another"
                " output, or --force to replace it."
            )
        self._stale = stored if differences else None
        if files.keys() - {BUILDING, LOCK}:
            self.differences = differences
        self.complete = not differences and MANIFEST in files

    def _stored(self) -> dict[str, Any] | None:
        for name in (MANIFEST, BUILDING):
            if self.folder.exists(name):
                try:
                    value = json.loads(self.folder.read_bytes(name))
                    return {field.name: value[field.name] for field in fields(Derivation)}
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{self.folder.describe(name)} is damaged, or not Raytriever's. Nothing was touched: remove the"
                        " folder if you don't need it, or choose another output."
                    ) from error
        return None

    def _refuse_foreign(self, names: list[str]) -> None:
        if names:
            raise UserError(
                f"{self.folder.uri} is no artifact but holds files ({names[0]}{', …' if len(names) > 1 else ''})."
                " Nothing was touched: choose an empty or a new folder as output."
            )

    def begin(self) -> dict[str, ShardRecord]:
        """Makes the folder ready and returns the shards that are already finished, by name."""
        self.folder.delete_temporary()
        if self._stale is not None:
            self._clear(self._stale)
        if not self.folder.exists(BUILDING):
            self.folder.write_bytes(BUILDING, to_json(asdict(self.derivation)))
        records = [self._finished(name) for name in self.folder.files() if _is_record(name)]
        return {record.name: record for record in records if record is not None}

    def _finished(self, name: str) -> ShardRecord | None:
        """The shard's record; None, and it is removed as unfinished, where it isn't of this derivation."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(self.folder.read_bytes(name))
            if stored[DERIVATION] == self.derivation.digest:
                return ShardRecord.from_json(stored)
        self.folder.delete(name)
        return None

    def _clear(self, stale: Mapping[str, Any]) -> None:
        """Removes what another derivation left, in an order that a kill can't spoil.

        What says that something is finished goes first; what says that the folder is ours, and whose, goes last.
        """
        self.folder.write_bytes(BUILDING, to_json(stale))
        names = self.folder.files().keys() - {LOCK}
        for name in sorted(names, key=lambda name: (name == BUILDING, name != MANIFEST, not _is_record(name))):
            self.folder.delete(name)
        self.folder.delete_empty_folders()

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
        self.folder.write_bytes(RUN, to_json(run))
        self.folder.write_bytes(MANIFEST, to_json(manifest))
        self.sweep()
        return Artifact(self.folder.uri)

    def sweep(self) -> None:
        """Removes what only the making needed; where a kill after the manifest prevented it, the next run does it."""
        files = self.folder.files()
        if BUILDING not in files:
            return
        needed = {MANIFEST, RUN, LOG, *Artifact(self.folder.uri).names()}
        for name in sorted(files.keys() - needed, key=lambda name: (name == BUILDING, name)):
            self.folder.delete(name)
        self.folder.delete_temporary()  # of workers that were killed while others went on
        self.folder.delete_empty_folders()


def _is_record(name: str) -> bool:
    return name.startswith(RECORDS) and name.endswith(".json")


def _sum(counters: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counter in counters:
        for name, count in counter.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))
