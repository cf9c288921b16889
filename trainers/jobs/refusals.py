"""A mistake that one of several workers finds ends the run, in the worker's own words.

A module of its own, without torch: Ray Train's controller imports it while training starts.
"""

from typing import Any

from ray.train import ControllerError, UserCallback, WorkerGroupError

from raytriever.retrieval.errors import StorageError, UserError


class EndAtMistakes(UserCallback):  # type: ignore[misc]
    """Ends the run where a worker raises a mistake; Ray Train by itself starts all workers again after any error.

    A mistake is a ``UserError`` that the next attempt would only repeat. Storage that fails may be well again by then,
    so a ``StorageError`` is none.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Raises the mistake of the first rank that has one: what a callback raises, Ray Train doesn't try again."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, UserError) and not isinstance(error, StorageError):
                raise error


def refusal_of(raised: BaseException | None) -> UserError | None:
    """What a worker refused, as far as that is why Ray Train ended the run with ``raised``; else None."""
    ended_by: list[Exception] = []
    if isinstance(raised, ControllerError):
        ended_by = [raised.controller_failure]
    elif isinstance(raised, WorkerGroupError):
        ended_by = [error for _, error in sorted(raised.worker_failures.items())]
    return next((error for error in ended_by if isinstance(error, UserError)), None)
