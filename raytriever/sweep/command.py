"""`raytriever sweep`."""

from typing import Annotated

import typer

from raytriever.command_line import OutputOption, PrintOption, RecipeArgument, SetOption, UntilOption, print_yaml
from raytriever.settings.configuration import validate
from raytriever.settings.recipe import load_recipe
from raytriever.stages.ray_session import refuse_copied_folder
from raytriever.stages.run import recipe_stages
from raytriever.sweep.report import sweep_lines, write_sweep
from raytriever.sweep.sweep import SweepSettings, plan_sweep, run_sweep


def sweep(
    recipe: RecipeArgument,
    grid: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B|FROM:TO:STEP", help="May be repeated.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="KEY=1,2,3", help="Gives mean and standard deviation.")] = None,
    overrides: SetOption = None,
    until: UntilOption = None,
    samples: Annotated[int | None, typer.Option(help="Draws so many settings from the grid's values.")] = None,
    seed: Annotated[int, typer.Option(help="Of --samples.")] = 0,
    measure: Annotated[list[str] | None, typer.Option(help="The first decides what is best; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="The evaluated system that is compared.")] = None,
    concurrent: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    output: OutputOption = None,
    print_config: PrintOption = False,
) -> None:
    """Runs a recipe for each setting of some values; exits with 1 where a trial failed, once the others are done."""
    lists = {"grid": grid or [], "set": overrides or [], "measures": measure or []}
    others = {"seeds": seeds, "until": until, "samples": samples, "seed": seed, "system": system, "output": output}
    values = lists | others | {"recipe": recipe, "concurrent": concurrent}
    refuse_copied_folder(load_recipe(recipe, overrides or [], output).output)
    planned = plan_sweep(validate(SweepSettings, values, "sweep"), recipe_stages)
    if print_config:
        print_yaml(planned.described())
        return
    swept = run_sweep(planned)
    for line in [*sweep_lines(swept), *write_sweep(swept, planned.recipe.output)]:
        typer.echo(line)
    raise typer.Exit(1 if swept.failed else 0)
