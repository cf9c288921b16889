"""Who is making an artifact: one run at a time. A later one takes over, and the one before it notices and stops."""

import os
import secrets
import socket
import time
from pathlib import Path
from typing import Self

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.storage import Folder

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
