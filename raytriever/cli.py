"""Raytriever: from a corpus to training batches, a trained retriever, a sharded index and its evaluation.

The command. ``raytriever run quickstart`` chains the jobs of a recipe; every job is a command of its own too::

    raytriever run quickstart --set clusters.cluster_size=32
    raytriever run quickstart --until batches
    raytriever embed --set collection=runs/mine/collection --set encoder.model=org/name --set output=runs/mine/vectors
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from raytriever.cluster import commands
from raytriever.cluster.tokens import open_environment
from raytriever.command_line import TracebackOption, user_errors
from raytriever.jobs import JOBS, recipe_stages, stage_class
from raytriever.reports.log import configure_log, log

app = typer.Typer(
    help="Train retrievers on well-built batches, index, search and evaluate. See README.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's name (recipes/) or the path of a .yaml file.")]
OutputOption = Annotated[str | None, typer.Option(help="Folder or URI for all artifacts of the run.")]
UntilOption = Annotated[str | None, typer.Option(help="The last stage to run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting; may be repeated.")
]
PrintOption = Annotated[bool, typer.Option("--print-config", help="Prints the resolved settings and stops.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replaces a different artifact in the output folder.")]


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    each: Annotated[str | None, typer.Option(metavar="KEY=A,B,C", help="Runs once for each value of one key.")] = None,
    output: OutputOption = None,
    until: UntilOption = None,
    print_config: PrintOption = False,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Runs a recipe: finished stages are reused, interrupted ones go on, changed ones and later ones run again."""
    with user_errors(traceback_wanted):
        from raytriever.settings.recipe import load_recipe, load_variants

        if each is None:
            loaded = {"": load_recipe(recipe, overrides or [], output)}
        else:
            loaded = load_variants(recipe, overrides or [], output, each)
        _run(loaded, until, print_config)


def _run(recipes: dict[str, Any], until: str | None, print_config: bool) -> None:
    """Runs recipes one after the other, all of them checked before the first begins."""
    from raytriever.stages.run import run_variants

    wanted = {variant: recipe.names_until(until) for variant, recipe in recipes.items()}
    stages = {variant: recipe_stages(recipe) for variant, recipe in recipes.items()}
    if print_config:
        for variant, recipe in recipes.items():
            shown = {name: {"job": s.command} | s.config.model_dump(mode="json") for name, s in stages[variant].items()}
            _print_yaml({"output": recipe.output, "stages": shown})
        return
    run_variants(stages, wanted, next(iter(recipes.values())).name)


def _print_yaml(values: dict[str, Any]) -> None:
    import yaml

    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@app.command()
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
    traceback_wanted: TracebackOption = False,
) -> None:
    """Runs a recipe for each setting of some values; exits with 1 where a trial failed, once the others are done."""
    with user_errors(traceback_wanted):
        from raytriever.settings.configuration import validate
        from raytriever.settings.recipe import load_recipe
        from raytriever.stages.ray_session import refuse_copied_folder
        from raytriever.sweep.report import sweep_lines, write_sweep
        from raytriever.sweep.sweep import SweepSettings, plan_sweep, run_sweep

        lists = {"grid": grid or [], "set": overrides or [], "measures": measure or []}
        others = {"seeds": seeds, "until": until, "samples": samples, "seed": seed, "system": system, "output": output}
        values = lists | others | {"recipe": recipe, "concurrent": concurrent}
        refuse_copied_folder(load_recipe(recipe, overrides or [], output).output)
        planned = plan_sweep(validate(SweepSettings, values, "sweep"), recipe_stages)
        if print_config:
            _print_yaml(planned.described())
            return
        swept = run_sweep(planned)
        for line in [*sweep_lines(swept), *write_sweep(swept, planned.recipe.output)]:
            typer.echo(line)
    raise typer.Exit(1 if swept.failed else 0)


@app.command()
def show(
    batches: Annotated[str, typer.Argument(help="A batches artifact.")],
    batch: Annotated[int, typer.Option(help="Number of the batch.")] = 0,
    epoch: Annotated[int, typer.Option(help="Number of the epoch.")] = 0,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Prints one stored batch so that a person can read it."""
    with user_errors(traceback_wanted):
        from pipelines.batch_description import describe_batch
        from pipelines.batches import BatchReader

        typer.echo("\n".join(describe_batch(BatchReader(batches), epoch, batch)))


@app.command()
def compare(
    systems: Annotated[list[str] | None, typer.Argument(metavar="[NAME=]EVALUATION[:SYSTEM] or [NAME=]RUN ...")] = None,
    seeds: Annotated[list[str] | None, typer.Option(metavar="NAME=A,B,C", help="One system's runs by seed.")] = None,
    collection: Annotated[str | None, typer.Option(help="Judges runs; gives the texts of queries.")] = None,
    split: Annotated[str | None, typer.Option(help="Which judgments of the collection; test.")] = None,
    qrels: Annotated[str | None, typer.Option(help="Judges runs: a TREC or BEIR qrels file.")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="Such as nDCG@10; may be repeated.")] = None,
    like: Annotated[str | None, typer.Option(help="Whose conventions: trec, beir, mteb or coir.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Tests only the differences from this system.")] = None,
    margin: Annotated[float, typer.Option(help="Differences within ± this are equivalent.")] = 0.05,
    level: Annotated[float, typer.Option(help="Significance level.")] = 0.05,
    output: Annotated[str | None, typer.Option(help="Folder for comparison.html and comparisons.json.")] = None,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Tests systems against one another, query by query."""
    with user_errors(traceback_wanted):
        from raytriever.settings.configuration import validate
        from raytriever.stages.ray_session import refuse_copied_folder
        from retrieval.evaluation.comparison import (
            ComparisonSettings,
            compare_sources,
            comparison_lines,
            write_comparison,
        )

        if output is not None:
            refuse_copied_folder(output)
        values = {"collection": collection, "split": split, "qrels": qrels, "like": like, "baseline": baseline}
        lists = {"systems": systems or [], "seeds": seeds or [], "measures": measure or []}
        settings = validate(ComparisonSettings, values | lists | {"margin": margin, "level": level}, "compare")
        compared = compare_sources(settings)
        written = [] if output is None else write_comparison(compared, output)
        for line in [*comparison_lines(compared), *written]:
            typer.echo(line)


@app.command()
def push(
    model: Annotated[str, typer.Argument(help="A model artifact.")],
    repo_id: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Makes a new repository private.")] = False,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Pushes a trained model to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`."""
    with user_errors(traceback_wanted):
        from trainers.record.hub import push_to_hub

        typer.echo(push_to_hub(model, repo_id, private=private))


def _job_command(job: str) -> Callable[..., None]:
    def command(
        config: Annotated[Path | None, typer.Argument(help="YAML file with the job's settings.")] = None,
        overrides: SetOption = None,
        print_config: PrintOption = False,
        force: ForceOption = False,
        traceback_wanted: TracebackOption = False,
    ) -> None:
        with user_errors(traceback_wanted):
            _run_job(job, config, overrides or [], print_config, force)

    command.__doc__ = JOBS[job][2]
    return command


def _run_job(job: str, config: Path | None, overrides: list[str], print_config: bool, force: bool) -> None:
    from raytriever.settings.configuration import apply_overrides, read_yaml, validate
    from raytriever.stages.preflight import check_before_run
    from raytriever.stages.ray_session import RaySession
    from raytriever.stages.stage import closing_lines, run_stage

    values = read_yaml(config, str(config)) if config else {}
    stage_type = stage_class(job, job)
    stage = stage_type(validate(stage_type.config_class, apply_overrides(values, overrides), f"Settings of {job}"))
    if print_config:
        _print_yaml(stage.config.model_dump(mode="json"))
        return
    check_before_run({job: stage}, [job])
    with RaySession() as session:
        artifact = run_stage(stage, session, replace=force)
    for line in closing_lines([(stage, artifact)]):
        log.info(line)


for _job in JOBS:
    app.command(_job)(_job_command(_job))
app.command("submit", context_settings={"allow_interspersed_args": False})(commands.submit)
app.add_typer(commands.jobs, name="jobs")
app.command("doctor")(commands.doctor)


def main() -> None:
    """Entry point of the ``raytriever`` command."""
    with user_errors(False):
        configure_log()
        open_environment()
    app()
