"""Progress of long work: a live line in a terminal, occasional lines in a log, with rate and time left."""

import sys
import time

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from raytriever.reports.log import console, is_json, log

LOG_INTERVAL_SECONDS = 15.0


class ProgressLine:
    """Counts finished units of one piece of work; use as a context manager.

    ``total`` may be unknown (None). ``unit`` is the plural noun of what is counted ("texts", "steps"). ``read``: where
    they come from, shown until the first is done.
    """

    def __init__(self, title: str, total: int | None, unit: str, read: str = "") -> None:
        self._title = title
        self._unit = unit
        self._begun = f"reading {read}" if read else f"no {unit} yet"
        self._started = self._logged = time.monotonic()
        self._before = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            get_time=time.monotonic,
        )
        self._task = self._progress.add_task(title, total=total, rate="", left="")
        self._live = self._progress if sys.stderr.isatty() and not is_json() else None

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def start_at(self, done: int) -> None:
        """Units that are finished; neither they nor the time until now count for the rate."""
        self._progress.reset(self._task, completed=done)
        self._before, self._started = done, time.monotonic()

    def advance(self, units: int, note: str = "") -> None:
        """Counts ``units`` more; ``note`` is shown behind the rate (the loss, say)."""
        self._progress.advance(self._task, units)
        task, now = self._progress.tasks[0], time.monotonic()
        rate = left = ""
        # since the start: results of several workers come in bursts, so the time between two of them tells nothing, nor
        # does the first second
        elapsed = now - self._started
        if elapsed >= 1 and (speed := (task.completed - self._before) / elapsed):
            rate = f"{speed:,.1f} {self._unit}/s"
            left = "" if task.remaining is None else f"{format_seconds(task.remaining / speed)} left"
        if self._live:
            self._live.update(self._task, rate=f"{rate} {note}".strip(), left=left)
        elif now - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = now
            of_total = "" if task.total is None else f" of {task.total:,}"
            count = f"{task.completed:,}{of_total} {self._unit}" if task.completed else self._begun
            log.info(f"  {self._title}: {', '.join(part for part in (count, rate, left, note) if part)}")


def format_seconds(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
