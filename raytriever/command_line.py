"""What commands share: options, how settings are shown, and how a user's mistake ends."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from raytriever.errors import UserError
from raytriever.reports.log import fields_of, log
from raytriever.reports.table import printable

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's name (recipes/) or the path of a .yaml file.")]
OutputOption = Annotated[str | None, typer.Option(help="Folder or URI for all artifacts of the run.")]
UntilOption = Annotated[str | None, typer.Option(help="The last stage to run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting; may be repeated.")
]
PrintOption = Annotated[bool, typer.Option("--print-config", help="Prints the resolved settings and stops.")]


def echo(text: str, *, nl: bool = True) -> None:
    """Prints to stdout; no command does so by other means, as texts and names of strangers would reach the terminal."""
    typer.echo(printable(text), nl=nl)  # noqa: TID251


@contextmanager
def user_errors(*, with_traceback: bool = False) -> Iterator[None]:
    """Shows a ``UserError`` as one paragraph and exits with code 2. An interrupt (Ctrl-C, SIGTERM) exits with 130.

    Errors of the system about a file (no right to read it, a name too long) are shown in the same way.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        if with_traceback:
            log.error("".join(traceback.format_exception(error)).rstrip())
        said = error if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"
        log.error(f"raytriever: {said}", extra={"fields": fields_of(error)})
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        message = "raytriever: interrupted; run the same command again to resume."
        log.error(message, extra={"fields": fields_of(error)})
        raise SystemExit(130) from error
