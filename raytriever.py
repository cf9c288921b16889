"""Raytriever: from a corpus to training batches, a trained retriever, a sharded index and its evaluation.

The command. ``raytriever run quickstart`` chains the jobs of a recipe; every job is a command of its own too::

    raytriever run quickstart --set clusters.cluster_size=32
    raytriever run quickstart --until batches
    raytriever embed --set collection=runs/mine/collection --set encoder.model=org/name --set output=runs/mine/vectors
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

# This one file is the command and the package: ``import raytriever.pipelines`` finds the folder beside it,
# in a checkout as in a wheel, without claiming the top-level names ``pipelines``, ``trainers``, ``retrieval``.
__path__ = [str(Path(__file__).parent)]
if __name__ == "__main__":
    sys.modules["raytriever"] = sys.modules["__main__"]  # by which name everything else imports it

from raytriever.retrieval.command_line import TracebackOption, user_errors
from raytriever.retrieval.jobs import commands
from raytriever.retrieval.jobs.tokens import open_environment
from raytriever.retrieval.log_lines import check_log_form

# command: (module, class, what it does)
JOBS = {
    "collect": ("retrieval.jobs.collect", "Collect", "Read a source in any of many formats into a collection."),
    "chunk": ("pipelines.jobs.chunk", "Chunk", "Cut documents into chunks: sentences, Markdown or source code."),
    "context": ("retrieval.jobs.context", "Context", "Fit a contextual encoder's context to a collection."),
    "embed": ("retrieval.jobs.embed", "Embed", "Embed the documents and queries of a collection."),
    "lsa": ("retrieval.jobs.lsa", "Lsa", "Vectors from TF-IDF or BM25 weights and an SVD, without an encoder."),
    "queries": ("pipelines.jobs.queries", "Queries", "Make queries and judgments out of documents."),
    "pairs": ("pipelines.jobs.pairs", "Pairs", "Turn a split's judgments into training pairs."),
    "cluster": ("pipelines.jobs.cluster", "Cluster", "Cluster pairs within their domains."),
    "pack": ("pipelines.jobs.pack", "Pack", "Pack clusters into equal batches along a tour."),
    "filter": ("pipelines.jobs.filter", "Filter", "Mask false negatives, add hard negatives, write training batches."),
    "group": ("pipelines.jobs.group", "Group", "Group chunks of a few documents into training batches."),
    "lists": ("pipelines.jobs.lists", "Lists", "Make training batches of labelled candidate lists."),
    "mix": ("pipelines.jobs.mix", "Mix", "Mix batches of several artifacts, all or by ratio."),
    "publish": ("pipelines.jobs.publish", "Publish", "Write batches for the hub or for another trainer."),
    "score": ("trainers.jobs.score", "Score", "Score the chunks of batches by a language model, for REPLUG."),
    "train": ("trainers.jobs.train", "Train", "Train an encoder on stored batches."),
    "index": ("retrieval.jobs.index", "Index", "Build a sharded FAISS index, or a BM25 index."),
    "search": ("retrieval.jobs.search", "Search", "Search an index with a split's queries; writes a TREC run."),
    "mine": ("retrieval.jobs.mine", "Mine", "Turn a run into hard negatives or labelled candidate lists."),
    "rerank": ("retrieval.jobs.rerank", "Rerank", "Rank a run's candidates anew by an encoder's vectors."),
    "fuse": ("retrieval.jobs.fuse", "Fuse", "Fuse runs by reciprocal rank."),
    "evaluate": ("retrieval.jobs.evaluate", "Evaluate", "Measure runs and test their differences."),
    "export": ("retrieval.jobs.export", "Export", "Write data in another format, or an encoder with its code."),
    "report": ("trainers.jobs.report", "Report", "Gather a run's figures and plots in one HTML file."),
}

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


def stage_class(job: str, where: str) -> Any:
    """The class of a job's stage. Raises ``UserError`` for an unknown job."""
    from raytriever.retrieval.configuration import did_you_mean
    from raytriever.retrieval.errors import UserError

    if job not in JOBS:
        raise UserError(f"{where}: '{job}' is no job.{did_you_mean(str(job), list(JOBS))}")
    module, name, _ = JOBS[job]
    return getattr(importlib.import_module(f"raytriever.{module}"), name)


def recipe_stages(recipe: Any) -> dict[str, Any]:
    """Every stage of a recipe as a checked ``Stage``, by name; nothing is read or written."""
    from raytriever.retrieval.configuration import map_inputs, validate

    stages = {}
    for name, settings in recipe.stages.items():
        where = f"Recipe {recipe.name}, stage {name}"
        stage = stage_class(settings.get("job", "(none)"), where)
        values = {key: value for key, value in settings.items() if key != "job"} | {"output": recipe.folder(name)}
        config = validate(stage.config_class, values, where)

        def resolve(key: str, value: str, stage_name: str = name) -> str:
            return str(recipe.resolve_input(stage_name, key, value))

        stages[name] = stage(map_inputs(config, resolve))
    return stages


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
        from raytriever.retrieval.recipe import load_recipe, load_variants

        if each is None:
            loaded = {"": load_recipe(recipe, overrides or [], output)}
        else:
            loaded = load_variants(recipe, overrides or [], output, each)
        _run(loaded, until, print_config)


def _run(recipes: dict[str, Any], until: str | None, print_config: bool) -> None:
    """Runs recipes one after the other, all of them checked before the first begins."""
    from raytriever.retrieval.jobs.variants import run_variants

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
        from raytriever.retrieval.configuration import validate
        from raytriever.retrieval.jobs.cluster import refuse_copied_folder
        from raytriever.retrieval.recipe import load_recipe
        from raytriever.retrieval.sweep.report_section import sweep_lines, write_sweep
        from raytriever.trainers.jobs.sweep import SweepSettings, plan_sweep, run_sweep

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
        from raytriever.pipelines.batch_description import describe_batch
        from raytriever.pipelines.batches import BatchReader

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
        from raytriever.retrieval.configuration import validate
        from raytriever.retrieval.evaluation.comparison import compare_sources
        from raytriever.retrieval.evaluation.comparison_report import comparison_lines, write_comparison
        from raytriever.retrieval.evaluation.comparison_sources import ComparisonSettings
        from raytriever.retrieval.jobs.cluster import refuse_copied_folder

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
        from raytriever.trainers.hub import push_to_hub

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
    from raytriever.retrieval.configuration import apply_overrides, read_yaml, validate
    from raytriever.retrieval.jobs.cluster import RaySession
    from raytriever.retrieval.jobs.stage import closing_lines, run_stage
    from raytriever.retrieval.progress import say

    values = read_yaml(config, str(config)) if config else {}
    stage_type = stage_class(job, job)
    stage = stage_type(validate(stage_type.config_class, apply_overrides(values, overrides), f"Settings of {job}"))
    if print_config:
        _print_yaml(stage.config.model_dump(mode="json"))
        return
    with RaySession() as session:
        artifact = run_stage(stage, session, replace=force)
    for line in closing_lines([(stage, artifact)]):
        say(line)


for _job in JOBS:
    app.command(_job)(_job_command(_job))
app.command("submit", context_settings={"allow_interspersed_args": False})(commands.submit)
app.add_typer(commands.jobs, name="jobs")
app.command("doctor")(commands.doctor)


def main() -> None:
    """Entry point of the ``raytriever`` command."""
    with user_errors(False):
        open_environment()
        check_log_form()
    app()


if __name__ == "__main__":
    main()
