"""One stage of a recipe as a command on a cluster, and what can be seen of its folder while it is made."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loopback_cluster import ROOT, LoopbackCluster, kill

LONGEST_COMMAND_SECONDS = 600
LOOK_EVERY_SECONDS = 0.02
JOINED = "Ray: joined the cluster"  # what a command says when its first stage goes to work


@dataclass(frozen=True)
class Run:
    """A recipe's stages by name, in order, and the command line that makes it small."""

    recipe: str
    overrides: tuple[str, ...]
    stages: tuple[str, ...]


class FolderWatch:
    """Which shards and checkpoints of a stage were completed, and when; those made twice show by a second time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._completed: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Notes what is complete now."""
        for pattern in ("shards/*.json", "checkpoints/*/checkpoint.json"):
            for path in self._folder.glob(pattern):
                with suppress(FileNotFoundError):  # removed when the artifact is complete
                    self._completed.add((str(path), path.stat().st_mtime_ns))

    @property
    def made_again(self) -> int:
        """How many were completed more than once."""
        return len(self._completed) - len({name for name, _ in self._completed})

    def being_made(self) -> int:
        """Shards that have a scratch folder now."""
        return sum(not (path / "bytes").exists() for path in self._folder.glob(".tmp-*"))


class Command:
    """``raytriever run RECIPE --until STAGE`` on the cluster."""

    def __init__(self, cluster: LoopbackCluster, run: Run, stage: str, output: Path) -> None:
        self.started = time.monotonic()
        self._log = cluster.folder / "command.log"
        command = [sys.executable, "raytriever.py", "run", run.recipe, "--output", str(output), "--until", stage]
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *run.overrides], env=cluster.environment, stdout=file, stderr=file, cwd=ROOT
            )

    def has_joined(self) -> bool:
        """Whether the first stage that is not there yet goes to work."""
        return JOINED in self._log.read_text(errors="replace")

    def wait_until(self, what: Callable[[], bool], watch: FolderWatch) -> bool:
        """Looks until ``what`` comes true or the command is over; whether it came true."""
        while not what():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.started > LONGEST_COMMAND_SECONDS:
                kill(self.process.pid)
            watch.look()
            time.sleep(LOOK_EVERY_SECONDS)
        return True

    def end(self, watch: FolderWatch) -> bool:
        """Waits until it is over; whether it did what it was asked to."""
        self.wait_until(lambda: False, watch)
        return self.process.returncode == 0

    @property
    def last_line(self) -> str:
        """What it said last."""
        return (self._log.read_text(errors="replace").strip().splitlines() or [""])[-1]
