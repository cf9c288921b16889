"""Progress of long work: a live line in a terminal, an occasional line in a log, both with rate and time left."""

import sys
import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from raytriever.reports.log import console, is_json, log

LOG_INTERVAL_SECONDS = 15.0


class ProgressLine:
    """Counts finished units of one piece of work; use as a context manager.

    ``total`` may be unknown (None). ``unit`` is the plural noun of what is counted ("texts", "steps").
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0
        self._counted = 0
        self._first: float | None = None
        self._logged = time.monotonic()
        self._live: Progress | None = None
        if sys.stderr.isatty() and not is_json():
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),  # our own: rich would count what an earlier run finished
                console=console,
                transient=True,
            )
            self._task = self._live.add_task(title, total=total, rate="", left="")

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def start_at(self, done: int) -> None:
        """Units that an earlier run finished; they don't count for the rate."""
        self._done = done

    def advance(self, units: int, note: str = "") -> None:
        """Counts ``units`` more; ``note`` is shown behind the rate (the loss, say)."""
        now = time.monotonic()
        self._done += units
        if self._first is None:
            self._first = now  # workers have started: the rate and the time left count from here
        else:
            self._counted += units
        if self._live:
            rate = f"{self._rate(now)} {note}".strip()
            self._live.update(self._task, completed=self._done, rate=rate, left=self._left(now))
        elif now - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = now
            parts = (self._count(), self._rate(now), self._left(now), note)
            log.info(f"  {self._title}: {', '.join(part for part in parts if part)}")

    def _count(self) -> str:
        if not self._done:
            return f"no {self._unit} yet"
        total = "" if self._total is None else f" of {self._total:,}"
        return f"{self._done:,}{total} {self._unit}"

    def _rate(self, now: float) -> str:
        if self._first is None or not self._counted:
            return ""
        return f"{self._counted / max(now - self._first, 1e-9):,.1f} {self._unit}/s"

    def _left(self, now: float) -> str:
        if self._total is None or self._first is None or not self._counted:
            return ""
        seconds = (self._total - self._done) * (now - self._first) / self._counted
        return f"{format_seconds(seconds)} left"


def format_seconds(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
