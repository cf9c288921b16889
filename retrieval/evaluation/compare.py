"""`raytriever compare`."""

from typing import Annotated

import typer

from raytriever.settings.configuration import validate
from raytriever.stages.ray_session import refuse_copied_folder
from retrieval.evaluation.comparison import ComparisonSettings, compare_sources, comparison_lines, write_comparison


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
) -> None:
    """Tests systems against one another, query by query."""
    if output is not None:
        refuse_copied_folder(output)
    values = {"collection": collection, "split": split, "qrels": qrels, "like": like, "baseline": baseline}
    lists = {"systems": systems or [], "seeds": seeds or [], "measures": measure or []}
    settings = validate(ComparisonSettings, values | lists | {"margin": margin, "level": level}, "compare")
    compared = compare_sources(settings)
    written = [] if output is None else write_comparison(compared, output)
    for line in [*comparison_lines(compared), *written]:
        typer.echo(line)
