"""Making an artifact: going on where an interrupted run stopped, refusing what is another's, the manifest last."""

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
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
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings

# Who is making an artifact: one run at a time. A later one takes over, and the one before it notices and stops.

MAKER = "maker.json"


class Maker(Settings):
    """A run that makes an artifact. ``run``: drawn at random; ``started``: when its process did, as the system counts
    it, so that a number which the system has given to another process by now is told apart ('' where it doesn't say).
    """

    run: str
    host: str
    process: int
    started: str
    since: str

    @classmethod
    def this(cls) -> Self:
        """A new run of this process."""
        return cls(
            run=secrets.token_hex(8),
            host=socket.gethostname(),
            process=os.getpid(),
            started=_started(os.getpid()) or "",
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    @property
    def is_at_work(self) -> bool:
        """Whether it is another process of this machine that is still there; of other machines nobody knows."""
        return (
            self.host == socket.gethostname()
            and self.process != os.getpid()
            and bool(self.started)
            and _started(self.process) == self.started
        )

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def stored_maker(folder: Folder) -> Maker | None:
    """The run that makes the artifact in ``folder``, as it says there; None where none does."""
    try:
        return Maker.model_validate_json(folder.read_bytes(MAKER))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def maker_run(folder: Folder) -> str:
    """Which run makes the artifact in ``folder``; '' where none does."""
    maker = stored_maker(folder)
    return maker.run if maker else ""


def _started(process: int) -> str | None:
    """When a running process started, in the system's ticks; None where there is none, or the system doesn't say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started  # dead, though not yet gone


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
        self._maker: Maker | None = None
        self._checked = 0.0
        stored = self._stored()
        files = self.folder.files()
        if stored is None:
            self._refuse_foreign(list(files))
            return
        differences = derivation.differences(stored)
        if differences and not replace and files.keys() - {BUILDING, MAKER}:
            raise UserError(
                f"{uri} holds a different {stored['kind']} artifact: {'; '.join(differences[:_SHOWN])}"
                f"{f'; and {len(differences) - _SHOWN} more' if len(differences) > _SHOWN else ''}. Choose another"
                " output, or --force to replace it."
            )
        self._stale = stored if differences else None
        if files.keys() - {BUILDING, MAKER}:
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
        """Makes the folder ready and returns the shards that are already finished, by name.

        Raises ``UserError`` where another process of this machine is making it.
        """
        other = stored_maker(self.folder)
        if other is not None and other.is_at_work:
            raise UserError(
                f"{self.folder.uri} is being made already, by {other}. Wait for it, stop it, or choose another output."
            )
        self.folder.delete_temporary()
        if self._stale is not None:
            self._clear(self._stale)
        if not self.folder.exists(BUILDING):
            self.folder.write_bytes(BUILDING, to_json(asdict(self.derivation)))
        self._maker, self._checked = Maker.this(), time.monotonic()
        self.folder.write_bytes(MAKER, to_json(self._maker.model_dump()))
        records = [self._finished(name) for name in self.folder.files() if _is_record(name)]
        return {record.name: record for record in records if record is not None}

    def _finished(self, name: str) -> ShardRecord | None:
        """The shard's record; None, and it is removed as unfinished, where it isn't of this derivation.

        A worker of another run may have written it after that run had lost the folder, or something that doesn't say
        what it made the shard by: earlier versions didn't.
        """
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(self.folder.read_bytes(name))
            if stored[DERIVATION] == self.derivation.digest:
                return ShardRecord.from_json(stored)
        self.folder.delete(name)
        return None

    @property
    def run(self) -> str:
        """Which run this is, as ``begin`` drew it; '' before."""
        return self._maker.run if self._maker else ""

    def require_own(self, *, seconds: float = 0.0, unfinished: bool = True) -> None:
        """Raises ``UserError`` where another run has begun to make the artifact since ``begin``.

        Where it is ``unfinished`` still, also where another run has ended it. Looks again only where the last look is
        ``seconds`` ago.
        """
        if self._maker is None or time.monotonic() < self._checked + seconds:
            return
        self._checked = time.monotonic()
        now = stored_maker(self.folder)
        if now is None:
            if not unfinished:
                return
            raise UserError(
                f"{self.folder.uri} is no longer this run's: another run has made it meanwhile, or files were removed"
                " there. This run stops; the same command again reuses what is there."
            )
        if now.run != self._maker.run:
            raise UserError(
                f"{self.folder.uri} is made by another run now ({now}), so this one stops. Shards that are finished"
                " stay; run only one of the two, or choose another output."
            )

    def release(self) -> None:
        """Says no longer that this run makes the artifact."""
        now = stored_maker(self.folder)
        if now is not None and self._maker is not None and now.run == self._maker.run:
            self.folder.delete(MAKER)

    def _clear(self, stale: Mapping[str, Any]) -> None:
        """Removes what another derivation left, in an order that a kill can't spoil.

        What says that something is finished goes first; what says that the folder is ours, and whose, goes last.
        """
        self.folder.write_bytes(BUILDING, to_json(stale))
        names = self.folder.files()
        for name in sorted(names, key=lambda name: (name == BUILDING, name != MANIFEST, not _is_record(name))):
            self.folder.delete(name)
        self.folder.delete_empty_folders()

    def finish(self, shards: list[ShardRecord], facts: Mapping[str, Any], run: Mapping[str, Any]) -> Artifact:
        """Writes ``run.json`` and, last, the manifest over ``shards`` (in their given order); tidies up.

        Raises ``UserError`` as ``require_own``.
        """
        self.require_own()
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
