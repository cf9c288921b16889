"""Making an artifact: resumes an interrupted run, refuses another artifact's folder, writes the manifest last."""

import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from raytriever.artifacts.artifact import (
    BESIDE,
    BUILDING,
    DERIVATION,
    MANIFEST,
    RECORDS,
    RUN,
    SCHEMA_VERSION,
    STAMPS,
    Artifact,
    Derivation,
    ShardRecord,
    to_json,
    write_stamps,
)
from raytriever.artifacts.storage import Folder, storage_errors
from raytriever.errors import StorageError, Unfinishable, UserError

_LOCK = "lock-"
_WITHDRAWAL_SECONDS = 2.0  # that others have, of those that begin at one moment


@dataclass(frozen=True)
class Lock:
    """The contents of ``lock-….json``: the run that makes the folder's artifact. Only one run at a time may."""

    run: str  # drawn at random
    host: str
    process: int
    started: str  # the process, in the system's ticks; another one may have its number by now
    since: str  # for people

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


@contextmanager
def locked(folder: Folder, *, force: bool = False) -> Iterator[None]:
    """Holds a lock on the folder, so that no other run makes the artifact meanwhile.

    Every run first writes a lock file of its own and then looks for those of others. So of two runs that begin together
    at least one sees the other, in an object store too. If both do, the run with the later name withdraws and the other
    waits for that. A lock of a killed run of this machine is removed. Raises ``UserError`` if another run holds a lock.
    Whether a run of another machine has ended can't be known here, so its lock counts unless ``force`` is set.
    """
    own = Lock.of_this_process()
    name = f"{_LOCK}{own.run}.json"
    with storage_errors(folder.uri):
        folder.write_bytes(name, to_json(asdict(own)))
    try:
        until = time.monotonic() + _WITHDRAWAL_SECONDS
        while others := _other_locks(folder, name, force):
            first = min(others)
            if first < name or time.monotonic() > until:
                raise UserError(_refusal(folder, first, others[first]))
            time.sleep(_WITHDRAWAL_SECONDS / 20)
        yield
    finally:
        with suppress(OSError, StorageError):  # of what ends the run, that is the lesser trouble
            folder.delete(name)


def is_lock(name: str) -> bool:
    """Whether a file in an artifact's folder is the lock of a run."""
    return name.startswith(_LOCK)


def _other_locks(folder: Folder, own: str, force: bool) -> dict[str, Lock]:
    """Locks of other runs, by their files. Stale locks are removed, with ``force`` also those of other machines."""
    found = {}
    for name in folder.files():
        if not is_lock(name) or name == own:
            continue
        try:
            lock = Lock(**json.loads(folder.read_bytes(name)))
        except FileNotFoundError:
            continue  # that run has ended just now
        except (ValueError, TypeError):
            folder.delete(name)  # a lock is whole or absent, so this is none
            continue
        is_here = lock.host == socket.gethostname()
        ended = lock.process == os.getpid() or not lock.started or _started(lock.process) != lock.started
        if ended if is_here else force:
            folder.delete(name)
        else:
            found[name] = lock
    return found


def _refusal(folder: Folder, name: str, lock: Lock) -> str:
    if lock.host == socket.gethostname():
        return f"{folder.uri} is being made already, by {lock}. Wait for it, stop it, or choose another output."
    return (
        f"{folder.uri} is being made by {lock}, as far as this machine knows. Wait for it, or choose another output. If"
        f" that run has ended, run again with --force, or delete {folder.describe(name)}."
    )


_SHOWN = 5  # differences, in an error


class ArtifactWriter:
    """Makes one artifact, or resumes an interrupted run of the same derivation.

    ``complete`` is True if the artifact exists already. Raises ``UserError`` if the folder holds another artifact (or
    part of one) and ``replace`` is off, naming the fields that differ. Also if it holds files that are not an artifact.
    """

    def __init__(self, uri: str, derivation: Derivation, *, replace: bool = False) -> None:
        self.folder = Folder(uri)
        self.derivation = derivation
        self.complete = False
        self.differences: list[str] = []  # another derivation's, if its files will be replaced
        self._stale: dict[str, Any] | None = None  # another derivation: its files are removed first
        self._replace = replace
        self._look()

    def _look(self) -> None:
        """Finds the folder's contents."""
        self.folder.refuse_links()
        stored = self._stored()
        files = {name for name in self.folder.files() if not is_lock(name)}
        if stored is None and files:
            raise UserError(
                f"{self.folder.uri} is no artifact but holds files ({min(files)}{', …' if len(files) > 1 else ''})."
                " Nothing was changed. Choose an empty or a new folder as output."
            )
        if stored is None:
            return
        differences = self.derivation.differences(stored)
        if differences and not self._replace and files - {BUILDING}:
            raise UserError(
                f"{self.folder.uri} holds a different {'' if MANIFEST in files else 'unfinished '}{stored['kind']}"
                f" artifact: {'; '.join(differences[:_SHOWN])}"
                f"{f'; and {len(differences) - _SHOWN} more' if len(differences) > _SHOWN else ''}. Choose another"
                " output, or give --force to replace it."
            )
        inner = [name for name in files if name.endswith((f"/{MANIFEST}", f"/{BUILDING}"))]
        if inner and (differences or BUILDING in files):
            raise UserError(
                f"{self.folder.describe(min(inner))} is another artifact's, which would be removed with"
                f" {self.folder.uri}. Nothing was changed. Move it, or choose another output."
            )
        self._stale = stored if differences else None
        self.differences = differences if files - {BUILDING} else []
        self.complete = not differences and MANIFEST in files

    def _stored(self) -> dict[str, Any] | None:
        for name in (MANIFEST, BUILDING):
            if self.folder.exists(name):
                try:
                    value = json.loads(self.folder.read_bytes(name))
                    return {field.name: value[field.name] for field in fields(Derivation)}
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise UserError(
                        f"{self.folder.describe(name)} is damaged, or was not made by Raytriever. Nothing was"
                        " changed. Remove the folder if you don't need it, or choose another output."
                    ) from error
        return None

    @contextmanager
    def making(self, *, force: bool = False) -> Iterator[dict[str, ShardRecord]]:
        """Holds the folder's lock, with the shards that are already finished, by name.

        If nothing was made, or the artifact is ``Unfinishable``, the folder is left empty. Raises ``UserError`` as
        ``locked``.
        """
        with locked(self.folder, force=force):
            try:
                yield self.begin()
            except Unfinishable:
                self._clear(asdict(self.derivation))
                raise
            finally:
                if not self.complete and [name for name in self.folder.files() if not is_lock(name)] == [BUILDING]:
                    self.folder.delete(BUILDING)

    def begin(self) -> dict[str, ShardRecord]:
        """Makes the folder ready and returns the shards that are already finished, by name.

        Call it while holding the lock: the folder may have changed since this writer was made.
        """
        self._look()
        if self.complete:
            return {shard.name: shard for shard in Artifact(self.folder.uri).shards}
        self.folder.delete_temporary()
        if self._stale is not None:
            self._clear(self._stale)
        if not self.folder.exists(BUILDING):
            self.folder.write_bytes(BUILDING, to_json(asdict(self.derivation)))
        records = [self._finished(name) for name in self.folder.files() if _is_record(name)]
        return {record.name: record for record in records if record is not None}

    def _finished(self, name: str) -> ShardRecord | None:
        """The shard's record; None, and it is removed, where it is of another derivation or its files have changed."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            stored = json.loads(self.folder.read_bytes(name))
            record = ShardRecord.from_json(stored)
            stamps = {file.name: self.folder.stamp(file.name) for file in record.files}
            unchanged = all(stamp is None or [*stamp] == stored[STAMPS][file] for file, stamp in stamps.items())
            if stored[DERIVATION] == self.derivation.digest and unchanged:
                return record
        self.folder.delete(name)
        return None

    def _clear(self, stale: Mapping[str, Any]) -> None:
        """Removes what another derivation left, in an order that a kill can't spoil.

        First the records that something is finished, last the record that the folder is an artifact's.
        """
        self.folder.write_bytes(BUILDING, to_json(stale))
        names = [name for name in self.folder.files() if not is_lock(name)]
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
        files = [file.name for shard in shards for file in shard.files]
        write_stamps(self.folder, {name: stamp for name in files if (stamp := self.folder.stamp(name))})
        self.folder.write_bytes(MANIFEST, to_json(manifest))
        self.sweep()
        return Artifact(self.folder.uri)

    def sweep(self) -> None:
        """Removes what only the making needed; where a kill after the manifest prevented it, the next run does it."""
        files = self.folder.files()
        if BUILDING not in files:
            return
        needed = {*BESIDE, *Artifact(self.folder.uri).names()}
        left = [name for name in files if name not in needed and not is_lock(name)]
        for name in sorted(left, key=lambda name: (name == BUILDING, name)):
            self.folder.delete(name)
        self.folder.delete_temporary()  # of workers that were killed while others went on
        self.folder.delete_empty_folders()


def _is_record(name: str) -> bool:
    return name.startswith(RECORDS) and name.endswith(".json")


def _sum(counts: list[dict[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total
