"""`raytriever compare`: systems of evaluations tested against one another query by query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.command_line import echo
from raytriever.errors import UserError
from raytriever.reports.table import Table, counted
from raytriever.settings.configuration import did_you_mean
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.report import Evaluated, block_lines, evaluation_blocks, pair_table
from retrieval.evaluation.significance import compare_systems
from retrieval.evaluation.stored import StoredEvaluation, metrics_of

_SEED = 0  # of the permutations and of the bootstrap


class _Source(NamedTuple):
    """A ``system`` of the evaluation at ``path``."""

    path: str
    system: str


def _sources(arguments: Sequence[str]) -> dict[str, list[_Source]]:
    """Every system by its name, with its evaluations, one for each seed."""
    named: dict[str, list[_Source]] = {}
    found: dict[str, list[_Source]] = {}
    for argument in arguments:
        name, rest = _name_and_rest(argument)
        sources = _sources_at(rest)
        if name is None:
            several = {source.system: [source] for source in sources}
        elif len(sources) > 1:
            systems = ", ".join(source.system for source in sources)
            raise UserError(f"{argument} has {len(sources)} systems: {systems}. Choose one: {argument}:SYSTEM.")
        else:
            several = {name: named.setdefault(name, [])}
            several[name] += sources
        for system, of_system in several.items():
            if found.setdefault(system, of_system) is not of_system:
                raise UserError(f"Two systems are called '{system}'. Name them: first=PATH second=PATH.")
    return found


def _name_and_rest(argument: str) -> tuple[str | None, str]:
    """Splits at the first ``=``, but for one that belongs to the path, as in a sweep's folders."""
    name, equals, rest = argument.partition("=")
    is_path = "://" in name or any(path and Path(path).exists() for path in (argument, argument.rpartition(":")[0]))
    return (name, rest) if equals and not is_path else (None, argument)


def _sources_at(text: str) -> list[_Source]:
    parts = text.split(":")
    paths = [":".join(parts[:count]) for count in range(len(parts), 0, -1)]
    path = next((path for path in paths if path and is_artifact(path)), text)
    system = text[len(path) + 1 :]  # whose name may have a colon too
    systems = list(StoredEvaluation(path).metrics["means"])
    if system and system not in systems:
        raise UserError(f"{path} did not evaluate '{system}'.{did_you_mean(system, systems)}")
    return [_Source(path, name) for name in systems if not system or name == system]


@dataclass(frozen=True)
class Compared(Evaluated):
    """``seeds``: system to measure to the mean of each seed, for systems of several."""

    seeds: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)


def compare_sources(
    systems: Sequence[str],
    *,
    measures: Sequence[str] = (),
    baseline: str | None = None,
    margin: float = 0.05,
    level: float = 0.05,
) -> Compared:
    """Averages seeds, and tests every pair of systems (or every system against the baseline).

    ``systems``: each ``[NAME=]EVALUATION[:SYSTEM]``, those of one ``NAME`` one system's runs by training seed; the rest
    as ``compare`` says. A pair is the later system minus the earlier one. Raises ``UserError`` where an argument names
    no evaluation, names repeat, and evaluations were not made alike.
    """
    sources = _sources(systems)
    if len(sources) < 2:
        raise UserError(f"{counted(len(sources), 'system')} can't be compared: name at least 2.")
    if baseline is not None and baseline not in sources:
        raise UserError(f"--baseline {baseline}: no such system.{did_you_mean(baseline, [*sources])}")
    artifacts = {source.path: StoredEvaluation(source.path) for several in sources.values() for source in several}
    metrics = {path: artifact.metrics for path, artifact in artifacts.items()}
    first, *others = artifacts.values()
    for other in others:
        _require_alike(first, other)
    shown = _shared_measures(measures, [found["measures"] for found in metrics.values()])
    stored = {path: artifact.values() for path, artifact in artifacts.items()}
    runs = {name: [stored[path][system] for path, system in several] for name, several in sources.items()}
    query_ids = sorted({query for several in runs.values() for run in several for query in run.query_ids})
    runs = {name: [run.over(query_ids) for run in several] for name, several in runs.items()}
    values = {name: _average(several, shown) for name, several in runs.items()}
    if baseline is None:
        pairs = [(later, earlier) for earlier, later in combinations(values, 2)]
    else:
        pairs = [(name, baseline) for name in values if name != baseline]
    comparisons = compare_systems(values, shown, _SEED, margin, pairs)
    of_first = next(iter(metrics.values()))
    how = {key: of_first[key] for key in ("judgments", "like", "conventions")}
    firsts = {name: several[0] for name, several in sources.items()}
    how["made_with"] = {name: metrics[path]["made_with"].get(system, {}) for name, (path, system) in firsts.items()}
    return Compared(
        metrics=how | metrics_of(values, shown),
        comparisons=comparisons,
        seeds={
            name: {measure: [run.mean(measure) for run in several] for measure in shown}
            for name, several in runs.items()
            if len(several) > 1
        },
        level=level,
    )


def _require_alike(first: Artifact, other: Artifact) -> None:
    for name in ("collection", "qrels"):
        if first.manifest["inputs"].get(name) != other.manifest["inputs"].get(name):
            raise UserError(
                f"{first.uri} and {other.uri} were not judged by the same {name}, so their queries don't pair."
            )
    for name in ("split", "conventions", "answer_match"):
        here, there = first.config.get(name), other.config.get(name)
        if here != there:
            raise UserError(
                f"{first.uri} and {other.uri} differ in {name} ({here} and {there}): evaluate both alike first."
            )


def _shared_measures(wanted: Sequence[str], measures: Sequence[Sequence[str]]) -> list[str]:
    common = [name for name in measures[0] if all(name in found for found in measures)]
    for name in wanted:
        if name not in common:
            raise UserError(f"--measure {name}: not all were evaluated by it.{did_you_mean(name, common)}")
    if not common:
        raise UserError("The evaluations have no measure in common. Evaluate all by the same ones.")
    return list(wanted) or common


def _average(runs: Sequence[PerQuery], measures: Sequence[str]) -> PerQuery:
    """Each query's mean over the runs that it counts for."""
    averaged = {}
    for measure in measures:
        values = np.stack([run.values[measure] for run in runs])
        counted = (~np.isnan(values)).sum(axis=0)
        sums = np.nansum(values, axis=0)
        averaged[measure] = np.divide(sums, counted, out=np.full(len(sums), np.nan), where=counted > 0)
    return replace(runs[0], values=averaged, missing_queries=max(run.missing_queries for run in runs))


def _seed_tables(compared: Compared) -> list[Table]:
    """A row for each system of several seeds and each measure; no table without such systems."""
    rows = [
        [name, measure, f"{len(means)}", f"{np.mean(means):.4f} ± {np.std(means, ddof=1):.4f}"]
        + [f"{end(means):.4f}" for end in (min, max)]
        for name, by_measure in compared.seeds.items()
        for measure, means in by_measure.items()
    ]
    caption = (
        "Systems of several seeds: mean and standard deviation (n - 1) of the seeds' means. All tests use each"
        " query's mean over the seeds."
    )
    header = ["system", "measure", "seeds", "mean", "lowest", "highest"]
    return [Table(header, rows, caption, text_columns=2)] if rows else []


def compare(
    systems: Annotated[list[str] | None, typer.Argument(metavar="[NAME=]EVALUATION[:SYSTEM] ...")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="Such as nDCG@10; may be repeated.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Tests only the differences from this system.")] = None,
    margin: Annotated[float, typer.Option(help="Differences within ± this are equivalent.", min=1e-9)] = 0.05,
    level: Annotated[float, typer.Option(help="Significance level.", min=1e-9, max=0.999)] = 0.05,
) -> None:
    """Tests systems of evaluations against one another, query by query; one NAME's evaluations are of its seeds."""
    compared = compare_sources(systems or [], measures=measure or [], baseline=baseline, margin=margin, level=level)
    tables = [*_seed_tables(compared), pair_table(compared)]
    heading = f"{compared.metrics['queries']:,} queries of {compared.metrics['judgments']}"
    echo("\n".join([heading, "", *block_lines(evaluation_blocks(compared, tables))]))
