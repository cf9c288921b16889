"""Lines for the user as they are, or each as one JSON object for a log collector: ``RAYTRIEVER_LOG=json``.

An object has ``time`` (ISO 8601, UTC), ``message`` and what is known of where the line arose: ``job`` (the id of the
submitted job), ``run`` and ``stage`` (as ``jobs.metrics.stage_labels`` names them), ``shard``.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from raytriever.retrieval.errors import UserError

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
