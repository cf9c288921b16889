"""Progress of long work: a live line in a terminal, an occasional line in a log, both with rate and time left."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from raytriever.errors import UserError

# Lines for the user as they are, or each as one JSON object for a log collector: ``RAYTRIEVER_LOG=json``.
#
# An object has ``time`` (ISO 8601, UTC), ``message`` and what is known of where the line arose: ``job`` (the id of the
# submitted job), ``run`` and ``stage`` (as ``jobs.metrics.stage_labels`` names them), ``shard``.

_VARIABLE = "RAYTRIEVER_LOG"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the command of every job that was submitted, in no other

_RAISED_WITHIN = "_raytriever_log_fields"  # of an exception

_within: dict[str, str] = {}


def check_log_form() -> None:
    """Raises ``UserError`` where ``RAYTRIEVER_LOG`` is neither json nor text."""
    form = os.environ.get(_VARIABLE, "")
    if form not in ("", "json", "text"):
        raise UserError(f"{_VARIABLE} is '{form}'. It may be json (each line is a JSON object) or text, the default.")


def is_json() -> bool:
    """Whether lines are written as JSON."""
    return os.environ.get(_VARIABLE) == "json"


def log_line(message: str, raised: BaseException | None = None) -> str:
    """The message as it is, or as a JSON object in ASCII on one line; of where ``raised`` arose, if it says so."""
    if not is_json():
        return message
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    where = getattr(raised, _RAISED_WITHIN, _within)
    return json.dumps({"time": time, **_submitted_job(), **where, "message": message.strip()})


@contextmanager
def lines_of(**fields: str) -> Iterator[None]:
    """Lines that this process writes in the block carry ``fields``, and so does an exception that leaves it."""
    global _within
    outer = _within
    _within = outer | fields
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _RAISED_WITHIN):
            setattr(error, _RAISED_WITHIN, _within)
        raise
    finally:
        _within = outer


def fields_here() -> dict[str, str]:
    """What lines carry that this process writes now, for one that writes them in its place."""
    return dict(_within)


def _submitted_job() -> dict[str, str]:
    described = os.environ.get(SUBMITTED)
    job = json.loads(described).get("metadata", {}).get("job_submission_id") if described else None
    return {"job": job} if job else {}


LOG_INTERVAL_SECONDS = 15.0

console = Console(stderr=True, highlight=False, soft_wrap=True)
_hear: Callable[[str], object] | None = None


def say(message: str) -> None:
    """One line for the user, plain text; as a JSON object where ``log_lines`` says so, and then no blank ones."""
    if _hear is not None:
        _hear(message)
    elif not is_json():
        console.print(message, markup=False)
    elif message.strip():
        print(log_line(message), file=sys.stderr, flush=True)


@contextmanager
def heard_by(listener: Callable[[str], object]) -> Iterator[None]:
    """Hands every line of this process to ``listener``: a process without a terminal tells the one that has it."""
    global _hear
    _hear = listener
    try:
        yield
    finally:
        _hear = None


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
            self._live.update(self._task, completed=self._done, rate=rate, left=self._left(now).removeprefix(", "))
        elif now - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = now
            say(f"  {self._title}: {self._count()}, {self._rate(now)}{self._left(now)}{', ' + note if note else ''}")

    def _count(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        return f"{self._done:,}{total} {self._unit}"

    def _rate(self, now: float) -> str:
        if self._first is None or not self._counted:
            return "starting"
        return f"{self._counted / max(now - self._first, 1e-9):,.1f} {self._unit}/s"

    def _left(self, now: float) -> str:
        if self._total is None or self._first is None or not self._counted:
            return ""
        seconds = (self._total - self._done) * (now - self._first) / self._counted
        return f", {format_seconds(seconds)} left"


def format_seconds(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
