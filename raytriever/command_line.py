"""What commands share: options, how settings are shown, and how a user's mistake ends."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer

from raytriever.errors import UserError
from raytriever.reports.log import fields_of, log

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's name (recipes/) or the path of a .yaml file.")]
OutputOption = Annotated[str | None, typer.Option(help="Folder or URI for all artifacts of the run.")]
UntilOption = Annotated[str | None, typer.Option(help="The last stage to run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting; may be repeated.")
]
PrintOption = Annotated[bool, typer.Option("--print-config", help="Prints the resolved settings and stops.")]
_TracebackOption = Annotated[bool, typer.Option("--traceback", help="Shows where in the code an error arose.")]


def print_yaml(values: dict[str, Any]) -> None:
    """Prints settings as YAML."""
    import yaml

    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@contextmanager
def user_errors(with_traceback: bool) -> Iterator[None]:
    """Shows a ``UserError`` as one paragraph and exits with code 2; an interrupt exits with 130."""
    try:
        yield
    except UserError as error:
        if with_traceback:
            traceback.print_exception(error)
        log.error(f"raytriever: {error}", extra={"fields": fields_of(error)})
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        message = "raytriever: interrupted; run the same command again to go on from here."
        log.error(message, extra={"fields": fields_of(error)})
        raise SystemExit(130) from error


def with_user_errors(function: Callable[..., None]) -> Callable[..., None]:
    """A command that ends as ``user_errors`` says, and has the option ``--traceback``."""

    @wraps(function)
    def command(*arguments: Any, with_traceback: bool, **options: Any) -> None:
        with user_errors(with_traceback):
            function(*arguments, **options)

    of_function = inspect.signature(function, eval_str=True)
    option = inspect.Parameter(
        "with_traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_TracebackOption
    )
    command.__signature__ = of_function.replace(parameters=[*of_function.parameters.values(), option])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, "with_traceback": _TracebackOption}
    return command
