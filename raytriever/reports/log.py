"""Messages of a run to its user, by ``logging``: one logger, ``raytriever``, for all packages.

The command shows records as plain lines. With ``RAYTRIEVER_LOG=json`` each is one JSON object, for a log collector. An
object has ``time`` (ISO 8601, UTC), ``message`` and the known origin of the record. ``job`` is the id of the submitted
job. ``run`` and ``stage`` are named as in ``stages.metrics.stage_labels``. ``shard`` is the shard. Nobody reads the
output of Ray's workers, so their records travel to the driver (``log_to``), which handles them as its own.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from raytriever.errors import UserError
from raytriever.reports.table import printable

log = logging.getLogger("raytriever")
log.setLevel(logging.INFO)

console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the command of every job that was submitted, in no other

_VARIABLE = "RAYTRIEVER_LOG"
_RAISED_WITHIN = "_raytriever_log_fields"  # of an exception

_fields: ContextVar[dict[str, str]] = ContextVar("fields of log records", default={})  # noqa: B039  never changed


def _add_fields(record: logging.LogRecord) -> bool:
    """A worker's record has its own fields already; the driver's are added."""
    record.fields = _fields.get() | getattr(record, "fields", {})
    return True


log.addFilter(_add_fields)


def configure_log() -> None:
    """Shows the logger's records on stderr from now on.

    Raises ``UserError`` where ``RAYTRIEVER_LOG`` is neither json nor text.
    """
    form = os.environ.get(_VARIABLE, "")
    if form not in ("", "json", "text"):
        raise UserError(f"{_VARIABLE} is '{form}'. It may be json (each line is a JSON object) or text, the default.")
    handler = _ConsoleHandler()
    if is_json():
        handler.setFormatter(_JsonFormatter())
        handler.addFilter(lambda record: bool(record.getMessage().strip()))  # a blank line is for eyes
    log.handlers = [handler]
    log.propagate = False


def is_json() -> bool:
    """Whether lines are written as JSON."""
    return os.environ.get(_VARIABLE) == "json"


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Records of the block carry ``fields``, and so does an exception that leaves it (``fields_of``)."""
    token = _fields.set(_fields.get() | fields)
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _RAISED_WITHIN):
            setattr(error, _RAISED_WITHIN, _fields.get())
        raise
    finally:
        _fields.reset(token)


def fields_of(error: BaseException) -> dict[str, str]:
    """The fields of log records where ``error`` was raised."""
    found: dict[str, str] = getattr(error, _RAISED_WITHIN, {})
    return found


@contextmanager
def log_to(take: Callable[[logging.LogRecord], object], level: int = logging.INFO) -> Iterator[None]:
    """Hands this process's records of ``level`` and above to ``take``, and shows none: for a worker.

    The records can be pickled, and their attributes be written as JSON; the driver's ``log.handle`` takes them.
    """
    queue: Any = SimpleNamespace(put_nowait=take)  # all that is asked of a queue
    handler = QueueHandler(queue)
    handler.setLevel(level)
    handlers, propagate = log.handlers, log.propagate
    log.handlers, log.propagate = [handler], False
    try:
        yield
    finally:
        log.handlers, log.propagate = handlers, propagate


class _ConsoleHandler(logging.Handler):
    """Writes by rich's console, which keeps a live progress line below what is written."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(printable(self.format(record)), markup=False)


class _JsonFormatter(logging.Formatter):
    """One line of ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        submission = json.loads(os.environ.get(SUBMITTED) or "{}").get("metadata", {}).get("job_submission_id")
        where = ({"job": submission} if submission else {}) | getattr(record, "fields", {})
        line = json.dumps({"time": time, **where, "message": record.getMessage().strip()})
        return line.replace("\x7f", "\\u007f")  # the one control character that JSON may hold as it is
