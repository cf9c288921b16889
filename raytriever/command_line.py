"""What all commands share: an option, and how a user's mistake ends."""

import traceback
from typing import Annotated, Any

import typer

from raytriever.errors import UserError
from raytriever.reports.log import fields_of, log

TracebackOption = Annotated[bool, typer.Option("--traceback", help="Shows where in the code an error arose.")]


class user_errors:
    """Shows a ``UserError`` as one paragraph and exits with code 2; an interrupt exits with 130."""

    def __init__(self, with_traceback: bool) -> None:
        self._with_traceback = with_traceback

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError):
            if self._with_traceback:
                traceback.print_exception(error)
            log.error(f"raytriever: {error}", extra={"fields": fields_of(error)})
            raise SystemExit(2) from error
        if isinstance(error, KeyboardInterrupt):
            message = "raytriever: interrupted; run the same command again to go on from here."
            log.error(message, extra={"fields": fields_of(error)})
            raise SystemExit(130) from error
