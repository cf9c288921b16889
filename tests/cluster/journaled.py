"""A stage of slow shards that notes each time one is begun and finished; as a program, the driver of such a stage.

``python -m tests.cluster.journaled tasks|actors OUTPUT JOURNAL`` runs it on the cluster of ``RAY_ADDRESS``.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from raytriever.artifacts.artifact import ShardRecord, ShardWriter
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Phase, Shard, Stage, StageConfig


class Killed:
    """A stage whose workers die: the first that makes one of the shards ``killed_at`` kills itself.

    ``moment``: at the beginning, when the first ``file`` is there, or at the ``end``. A journal beside the output notes
    all beginnings.
    """

    killed_at: tuple[str, ...]
    moment: Literal["beginning", "file", "end"] = "beginning"

    def dies_at(self, shard: Shard) -> bool:
        return shard.name in self.killed_at

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        journal = Path(self.config.output).with_name("journal")
        dies = self.dies_at(shard) and all(seen.shard != shard.name for seen in notes(journal))
        note(str(journal), "begun", shard.name)
        if dies and self.moment == "beginning":
            kill_itself()
        if dies and self.moment == "file":
            writer.add = kill_itself
        record = super().make(shard, writer)
        if dies:
            kill_itself()
        return record


class OnFullDisk:
    """A stage whose disk is full as soon as it makes the shard ``full_at``."""

    full_at: str

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        if shard.name == self.full_at:
            path = writer.path

            def full(name: str) -> Path:
                place = path(name)
                if name != "spill" and not place.is_symlink():
                    place.symlink_to("/dev/full")  # a link, as Arrow removes the file that it fails to write
                return place

            writer.path = full
        return super().make(shard, writer)


def kill_itself(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class JournaledConfig(StageConfig):
    """``seconds``: that a shard takes. ``journal``: an absolute path."""

    shards: int = 20
    seconds: float = 0.3
    journal: str


class Journaled(Stage[JournaledConfig]):
    command = "journaled"
    kind = "numbers"
    config_class = JournaledConfig

    def resolved(self):
        return {key: value for key, value in super().resolved().items() if key not in ("seconds", "journal")}

    def phases(self) -> list[Phase]:
        return [Phase("", range(self.config.shards), self.write, intermediate=False)]

    def write(self, number: int, writer: ShardWriter) -> ShardRecord:
        note(self.config.journal, "begun", writer.name)
        for half in ("first", "second"):  # of two files, so that a kill may fall between them
            name = f"{half}/{number:05d}.txt"
            writer.path(name).write_text(f"{half} half of {number}\n" * (number + 1))
            time.sleep(self.config.seconds / 2)
            writer.add(name)
        record = writer.commit(number + 1)
        note(self.config.journal, "finished", writer.name)
        return record


class JournaledByActors(Journaled):
    keeps_state = True


KINDS = {"tasks": Journaled, "actors": JournaledByActors}


class Note(NamedTuple):
    """What the worker ``process`` notes of a ``shard``: 'begun' or 'finished'."""

    what: str
    shard: str
    process: int


def note(journal: str, what: str, shard: str) -> None:
    """Appends a line, whole: processes write at the same time."""
    handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{what} {shard} {os.getpid()}\n".encode())
    os.close(handle)


def notes(journal: Path) -> Iterator[Note]:
    """In the order in which they were made."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        what, shard, process = line.split()
        yield Note(what, shard, int(process))


def main() -> None:
    """Runs the stage."""
    kind, output, journal = sys.argv[1:]
    stage = KINDS[kind](JournaledConfig(output=output, journal=journal))
    with RaySession() as session:
        run_stage(stage, session)


if __name__ == "__main__":
    from tests.cluster import journaled  # workers find the classes under this name, not under __main__

    journaled.main()
