"""Raytriever: from a corpus to training batches, a trained retriever, a sharded index and its evaluation.

The command. ``raytriever run quickstart`` chains the jobs of a recipe; every job is a command of its own too::

    raytriever run quickstart --set clusters.cluster_size=32
    raytriever run quickstart --until batches
    raytriever embed --set collection=runs/mine/collection --set encoder.model=org/name --set output=runs/mine/vectors
"""

import os
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raytriever.command_line import OutputOption, PrintOption, RecipeArgument, SetOption, UntilOption, echo, user_errors
from raytriever.jobs import COMMANDS, JOBS, load, stage_class
from raytriever.reports.log import configure_log, log


def _print_version(asked: bool) -> None:
    if asked:
        echo(metadata.version("raytriever"))
        raise typer.Exit


TracebackOption = Annotated[bool, typer.Option("--traceback", help="Shows where in the code an error arose.")]
VersionOption = Annotated[bool, typer.Option("--version", callback=_print_version, help="Shows it.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replaces a different artifact, and takes over another machine's lock.")
]


class _Commands(TyperGroup):
    """Commands of the table. --help shows the table's lines, and a command is imported when it is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        with user_errors(with_traceback=ctx.params["with_traceback"]):
            return super().invoke(ctx)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for _name, (_, _line) in {**COMMANDS, **JOBS}.items():
    app.command(_name, help=_line)(lambda: None)


@app.callback()
def before_any_command(
    with_traceback: TracebackOption = False,  # noqa: ARG001  # read where a command is invoked
    version: VersionOption = False,  # noqa: ARG001
) -> None:
    """Train retrievers on well-built batches, index, search and evaluate. See README.md."""
    configure_log()


def _command(name: str) -> Any:
    """The command itself, of Typer's own class for it."""
    alone = typer.Typer(add_completion=False)
    interspersed = name != "submit"  # the arguments are another command's
    found = load(COMMANDS[name][0]) if name in COMMANDS else _job(name)
    alone.command(name, context_settings={"allow_interspersed_args": interspersed})(found)
    return typer.main.get_command(alone)


def run(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    output: OutputOption = None,
    until: UntilOption = None,
    print_config: PrintOption = False,
    force: Annotated[bool, typer.Option("--force", help="Takes over the locks of another machine's run.")] = False,
) -> None:
    """Runs a recipe. Finished stages are reused, interrupted ones resumed, changed ones and later ones made again."""
    from raytriever.settings.configuration import map_inputs
    from raytriever.settings.description import commented_recipe
    from raytriever.settings.recipe import load_recipe
    from raytriever.stages.recipe_run import recipe_stages, run_recipe

    loaded = load_recipe(recipe, overrides or [], output)
    stages = recipe_stages(loaded)
    if print_config:
        names = {loaded.folder(name): name for name in stages}
        shown = {
            name: (stage.command, map_inputs(stage.config, lambda _, path: names.get(path, path)))
            for name, stage in stages.items()
        }
        echo(commented_recipe(loaded.output, shown))
        return
    run_recipe(stages, loaded.names_until(until), loaded.name, loaded.output, force=force)
    if loaded.next and until is None:
        echo(f"\nnext: {loaded.next}")


def _job(job: str) -> Callable[..., None]:
    def command(
        config: Annotated[Path | None, typer.Argument(help="YAML file with the job's settings.")] = None,
        overrides: SetOption = None,
        print_config: PrintOption = False,
        force: ForceOption = False,
    ) -> None:
        from raytriever.settings.configuration import apply_overrides, read_yaml, validate
        from raytriever.settings.description import commented_yaml
        from raytriever.stages.ray_session import RaySession
        from raytriever.stages.recipe_run import check_before_run, closing_lines, run_stage

        values = apply_overrides(read_yaml(config, str(config)) if config else {}, overrides or [])
        stage_type = stage_class(job, job)
        stage = stage_type(validate(stage_type.config_class, values, f"Settings of {job}"))
        if print_config:
            echo(commented_yaml(stage.config))
            return
        check_before_run({job: stage}, [job])
        with RaySession() as session:
            artifact = run_stage(stage, session, replace=force, force=force)
        for line in closing_lines([(stage, artifact)]):
            echo(line)

    command.__doc__ = f"{JOBS[job][1]}\n\n`raytriever settings {job}` describes every setting."
    return command


def main() -> None:
    """Entry point of the ``raytriever`` command."""
    # of libraries that are loaded later: threads that spin while they wait take the time of whatever else runs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except Exception as error:  # a defect of ours; its message may hold a stranger's text
        log.error("".join(traceback.format_exception(error)).rstrip())
        sys.exit(1)
