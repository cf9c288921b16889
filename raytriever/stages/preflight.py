"""Checking a run's stages before the first begins, of which hours may lie before the one with the mistake."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Run, Stage, made_by


class NotLocal(UserError):
    """What this machine lacks, and another one of a cluster may have."""


@contextmanager
def warned_of_on_a_cluster() -> Iterator[None]:
    """On a cluster a ``NotLocal`` in it is a warning: the machine that needs it is another one."""
    try:
        yield
    except NotLocal as error:
        if not os.environ.get("RAY_ADDRESS"):
            raise
        log.warning(f"Warning: {error} (Other machines of the cluster may have it; this one doesn't.)")


def check_before_run(run: Run, names: Iterable[str]) -> None:
    """Checks the stages of these ``names``: their settings, and the inputs that come from outside the run.

    Raises ``UserError``.
    """
    for name in names:
        run[name].check_settings(run)
        run[name].check_inputs(inputs_made_by(None, run[name], run))


def inputs_made_by(maker: Stage[Any] | None, stage: Stage[Any], run: Run) -> set[str]:
    """Dotted keys of the inputs of ``stage`` that ``maker`` makes; None: those that no stage of the run makes."""
    return {key for key, path in input_paths(stage.config).items() if made_by(run, path) is maker}
