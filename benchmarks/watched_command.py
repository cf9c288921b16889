"""A recipe as a command on a cluster, given again when it fails, and what can be seen of its stages' folders."""

import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loopback_cluster import ROOT, LoopbackCluster, kill
from raytriever.artifacts.artifact import MANIFEST

LONGEST_COMMAND_SECONDS = 900
LOOK_EVERY_SECONDS = 0.02


@dataclass(frozen=True)
class Run:
    """A recipe's stages by name, in order, and the command line that makes it small."""

    recipe: str
    overrides: tuple[str, ...]
    stages: tuple[str, ...]


class FolderWatch:
    """When a stage began and finished, and which of its shards and checkpoints were completed when.

    Those made twice show by a second time.
    """

    def __init__(self, folder: Path) -> None:
        self.begun: float | None = None  # by the monotonic clock
        self.finished: float | None = None
        self._folder = folder
        self._completed: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Notes what is complete now."""
        if self.finished is not None or not self._folder.exists():
            return
        self.begun = self.begun or time.monotonic()
        for pattern in ("shards/*.json", "checkpoints/*/checkpoint.json"):
            for path in self._folder.glob(pattern):
                with suppress(FileNotFoundError):  # removed when the artifact is complete
                    self._completed.add((str(path), path.stat().st_mtime_ns))
        if (self._folder / MANIFEST).exists():
            self.finished = time.monotonic()

    @property
    def seconds(self) -> float:
        """From the first sight of the folder to that of the manifest, however many commands it took."""
        return self.finished - self.begun if self.finished is not None and self.begun is not None else float("nan")

    @property
    def made_again(self) -> int:
        """How many were completed more than once."""
        return len(self._completed) - len({name for name, _ in self._completed})

    def being_made(self) -> int:
        """Shards that have a scratch folder now."""
        return sum(not (path / "bytes").exists() for path in self._folder.glob(".tmp-*"))


class Command:
    """``raytriever run RECIPE --until STAGE`` on the cluster, given again whenever it fails, as a user would.

    ``watches`` look while something is waited for.
    """

    def __init__(
        self, cluster: LoopbackCluster, run: Run, until: str, output: Path, watches: Collection[FolderWatch]
    ) -> None:
        self.failures: list[str] = []  # what it said last, each time
        self._cluster, self._watches = cluster, watches
        self._log = cluster.folder / "command.log"
        self._line = [sys.executable, "-m", "raytriever", "run", run.recipe, "--output", str(output), "--until", until]
        self._line += run.overrides
        self._give()

    def _give(self) -> None:
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                self._line, env=self._cluster.environment, stdout=file, stderr=file, cwd=ROOT
            )
        self._given = time.monotonic()

    def wait_until(self, what: Callable[[], bool], failures: int) -> bool:
        """Looks until ``what`` comes true or the command has succeeded; whether it came true.

        Raises ``RuntimeError`` where the command has failed more than ``failures`` times by then.
        """
        while not what():
            code = self.process.poll()  # before the last look, which then sees all that was made
            for watch in self._watches:
                watch.look()
            if code == 0:
                return what()
            if code is not None:
                self.failures.append((self._log.read_text(errors="replace").strip().splitlines() or [""])[-1])
                if len(self.failures) > failures:
                    raise RuntimeError(f"{' '.join(self._line[1:])} fails: {self.failures[-1]}")
                self._give()
            if time.monotonic() - self._given > LONGEST_COMMAND_SECONDS:
                kill(self.process.pid)
            time.sleep(LOOK_EVERY_SECONDS)
        return True

    def end(self) -> None:
        """Kills it where it still runs."""
        self.process.kill()
        self.process.wait()
