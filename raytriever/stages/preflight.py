"""Checking a run's stages before the first begins, of which hours may lie before the one with the mistake."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from raytriever.artifacts.storage import absolute
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.stages.stage import Stage


class NotHere(UserError):
    """What this machine lacks, and another one of a cluster may have. ``by_driver``: the driver of a run needs it."""

    def __init__(self, problem: str, *, by_driver: bool = False) -> None:
        super().__init__(problem)
        self.by_driver = by_driver


def check_stage(stage: Stage[Any], run: Mapping[str, Stage[Any]], *, driven_elsewhere: bool = False) -> None:
    """``stage.check_before_run``. On a cluster, what only other machines need is a line if it isn't on this one.

    ``driven_elsewhere``: another process of the cluster makes the stage, as it does a sweep's trials. Raises
    ``UserError``.
    """
    try:
        stage.check_before_run(run)
    except NotHere as error:
        if not os.environ.get("RAY_ADDRESS") or (error.by_driver and not driven_elsewhere):
            raise
        log.warning(f"Warning: {error} (Other machines of the cluster may have it; this one doesn't.)")


@contextmanager
def missing_here(*, by_driver: bool = False) -> Iterator[None]:
    """Around a look for something: a ``UserError`` in it is a ``NotHere``."""
    try:
        yield
    except UserError as error:
        raise NotHere(str(error), by_driver=by_driver) from error


def is_at(path: str, other: str) -> bool:
    """Whether both are the same folder."""
    return _folder(path) == _folder(other)


def made_by(run: Mapping[str, Stage[Any]], path: str) -> Stage[Any] | None:
    """The stage of the run whose folder ``path`` is, or is in."""
    here = _folder(path)
    for stage in run.values():
        folder = _folder(stage.config.output)
        if here == folder or here.startswith(f"{folder}/"):
            return stage
    return None


def _folder(path: str) -> str:
    return absolute(path).rstrip("/")
