"""`raytriever compare`: systems tested against one another query by query, from evaluations or from runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from pydantic import Field

from raytriever.artifacts.artifact import Artifact, is_artifact, require_same_origin, to_strict_json
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.reports.report import Block, Details, render
from raytriever.reports.table import Table
from raytriever.settings.configuration import Settings, did_you_mean
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.conventions import ConventionOverrides, Like, resolve
from retrieval.evaluation.judging import collection_judgments, file_judgments, judge_rankings, made_with
from retrieval.evaluation.measures import DEFAULT_MEASURES, PerQuery
from retrieval.evaluation.report import (
    COLUMNS,
    Evaluated,
    evaluation_lines,
    note_lines,
    pair_table,
    result_section,
    signed,
)
from retrieval.evaluation.significance import compare_systems
from retrieval.evaluation.stored import EVALUATION, StoredEvaluation, how_it_was_measured, metrics_of


class ComparisonSettings(Settings):
    """What is compared: ``[NAME=]EVALUATION[:SYSTEM]``, or ``[NAME=]RUN`` with what judges it.

    ``seeds``: ``NAME=A,B,…``, runs of one system that differ in the training seed; their values are averaged.
    """

    systems: tuple[str, ...] = ()
    """Each ``[NAME=]EVALUATION[:SYSTEM]`` or ``[NAME=]RUN``."""
    seeds: tuple[str, ...] = ()
    """Each ``NAME=A,B,…``: one system's runs by training seed."""
    collection: str | None = None
    """Judges runs; gives the texts of queries."""
    qrels: str | None = None
    """A file that judges runs."""
    split: str | None = None
    """Of the collection's judgments; None: test."""
    measures: tuple[str, ...] = ()
    """None: those of the evaluations."""
    like: Like | None = None
    """Whose conventions; None: those of the evaluations, else trec's."""
    baseline: str | None = None
    """With one, only pairs with it are tested."""
    margin: float = Field(default=0.05, gt=0)
    """Differences within ± this count as none."""
    level: float = Field(default=0.05, gt=0, lt=1)
    """Of significance."""
    seed: int = Field(default=0, ge=0)
    """Of the permutations and of the bootstrap."""
    queries_shown: int = Field(default=3, ge=0)
    """Of each pair, those won and those lost."""


@dataclass(frozen=True)
class _Source:
    """A run (its artifact or file), or a ``system`` of the evaluation at ``path``."""

    path: str
    system: str | None = None


@dataclass(frozen=True)
class Loaded:
    """The runs of each system (several where it has seeds), and how they were measured, as ``metrics.json`` says it."""

    runs: dict[str, list[PerQuery]]
    measures: list[str]
    how: dict[str, Any]


def load(settings: ComparisonSettings) -> Loaded:
    """The values of all that the arguments name.

    Raises ``UserError`` where an argument is nothing of the kind, names repeat, and evaluations were not made alike.
    """
    sources = _sources(settings)
    if len(sources) < 2:
        raise UserError(f"{len(sources)} system can't be compared: name at least 2.")
    if settings.baseline is not None and settings.baseline not in sources:
        raise UserError(f"--baseline {settings.baseline}: no such system.{did_you_mean(settings.baseline, [*sources])}")
    are_evaluations = {source.system is not None for several in sources.values() for source in several}
    if len(are_evaluations) > 1:
        raise UserError("Evaluations and runs can't be mixed: evaluate the runs, or name the runs of all systems.")
    return _evaluated(settings, sources) if are_evaluations.pop() else _judged(settings, sources)


def _sources(settings: ComparisonSettings) -> dict[str, list[_Source]]:
    """Every system by its name, and the run or runs that it is made of."""
    found: dict[str, list[_Source]] = {}

    def add(name: str, several: list[_Source]) -> None:
        if name in found:
            raise UserError(f"Two systems are called '{name}'. Name them: first=PATH second=PATH.")
        found[name] = several

    for argument in settings.systems:
        name, rest = _name_and_rest(argument)
        if name is not None:
            add(name, [_only_source(rest, f"{name}={rest}")])
            continue
        for source in _sources_at(rest):
            path = Path(source.path.rstrip("/"))
            add(source.system or (path.name if is_artifact(source.path) else path.stem), [source])
    for argument in settings.seeds:
        name, rest = _name_and_rest(argument)
        if name is None:
            raise UserError(f"--seeds {argument!r} is not of the form NAME=A,B,C.")
        add(name, [_only_source(item, f"--seeds {name}: {item}") for item in _items(rest, f"--seeds {name}")])
    return found


def _only_source(text: str, where: str) -> _Source:
    sources = _sources_at(text)
    if len(sources) > 1:
        systems = ", ".join(str(source.system) for source in sources)
        raise UserError(f"{where} has {len(sources)} systems: {systems}. Choose one: {where}:SYSTEM.")
    return sources[0]


def _name_and_rest(argument: str) -> tuple[str | None, str]:
    """Splits at the first ``=``, but for one that belongs to the path of a run or an evaluation."""
    name, equals, rest = argument.partition("=")
    is_path = "://" in name or _exists(argument) or _exists(argument.rpartition(":")[0])
    return (name, rest) if equals and not is_path else (None, argument)


def _exists(path: str) -> bool:
    try:
        return path != "" and Path(path).exists()
    except OSError:  # a list of seeds may be longer than any path
        return False


def _items(text: str, where: str) -> list[str]:
    """The items of ``A,B,…``. A comma may belong to an item, as in a sweep's folders: each is as short as it can be.

    Raises ``UserError``, led by ``where``, for a rest with which no item begins.
    """
    pieces, items = text.split(","), []
    while pieces:
        beginnings = [",".join(pieces[: count + 1]) for count in range(len(pieces))]
        item = next((beginning for beginning in beginnings if _is_source(beginning)), None)
        if item is None:
            for beginning in beginnings:
                if _path_and_system(beginning)[1]:
                    _sources_at(beginning)  # raises: the evaluation is there, and has no such system
            raise UserError(
                f"{where}: '{beginnings[-1]}' neither is nor begins with an evaluation, a run artifact or a run file."
                " Is the path right?"
            )
        items.append(item)
        del pieces[: item.count(",") + 1]
    return items


def _is_source(text: str) -> bool:
    """Whether a run, an evaluation or a system of one is there."""
    path, system = _path_and_system(text)
    if not system:
        return is_artifact(path) or Path(path).is_file()
    return Artifact(path).kind == EVALUATION and system in StoredEvaluation(path).metrics["means"]


def _path_and_system(text: str) -> tuple[str, str]:
    path, _, system = text.rpartition(":")
    return (text, "") if is_artifact(text) or not path or not is_artifact(path) else (path, system)


def _sources_at(text: str) -> list[_Source]:
    path, system = _path_and_system(text)
    if is_artifact(path) and Artifact(path).kind == EVALUATION:
        systems = list(StoredEvaluation(path).metrics["means"])
        if system and system not in systems:
            raise UserError(f"{path} did not evaluate '{system}'.{did_you_mean(system, systems)}")
        return [_Source(path, name) for name in systems if not system or name == system]
    if system or not (is_artifact(path) or Path(path).is_file()):
        raise UserError(f"{text!r} is no evaluation, no run artifact and no run file. Is the path right?")
    return [_Source(path)]


def _evaluated(settings: ComparisonSettings, sources: dict[str, list[_Source]]) -> Loaded:
    """Values as evaluations have stored them; refused where these were not made alike."""
    artifacts = {source.path: StoredEvaluation(source.path) for several in sources.values() for source in several}
    metrics = {path: artifact.metrics for path, artifact in artifacts.items()}
    first, *others = artifacts.values()
    for other in others:
        _require_alike(first, other)
    how = next(iter(metrics.values()))
    if settings.qrels is not None or settings.split is not None or settings.like not in (None, how["like"]):
        raise UserError(
            f"{first.uri} was evaluated like '{how['like']}' by {how['judgments']} already; --qrels, --split and --like"
            " are for runs: name those."
        )
    if settings.collection is not None:  # for the texts of queries
        require_same_origin("collection", StoredCollection(settings.collection), *artifacts.values())
    common = [name for name in how["measures"] if all(name in found["measures"] for found in metrics.values())]
    for name in settings.measures:
        if name not in common:
            raise UserError(f"--measure {name}: not all were evaluated by it.{did_you_mean(name, common)}")
    if not common:
        raise UserError("The evaluations have no measure in common. Evaluate all by the same ones.")
    stored = {path: artifact.values() for path, artifact in artifacts.items()}
    runs = {name: [stored[s.path][str(s.system)] for s in several] for name, several in sources.items()}
    made = {name: metrics[several[0].path]["made_with"][several[0].system] for name, several in sources.items()}
    kept = ("judgments", "like", "conventions", "relevance_levels")
    return Loaded(runs, list(settings.measures) or common, {key: how[key] for key in kept} | {"made_with": made})


def _require_alike(first: Artifact, other: Artifact) -> None:
    for name in ("collection", "qrels"):
        if first.manifest["inputs"].get(name) != other.manifest["inputs"].get(name):
            raise UserError(f"{first.uri} and {other.uri} were judged by different {name}: their queries don't pair.")
    for name in ("split", "conventions", "answer_match"):
        here, there = first.config.get(name), other.config.get(name)
        if here != there:
            raise UserError(
                f"{first.uri} and {other.uri} differ in {name} ({here} and {there}): evaluate both alike first."
            )


def _judged(settings: ComparisonSettings, sources: dict[str, list[_Source]]) -> Loaded:
    """Values of runs, judged here."""
    if (settings.collection is None) == (settings.qrels is None):
        raise UserError("Runs are judged by either --collection (with --split) or --qrels: name one of the two.")
    if settings.qrels is not None and settings.split is not None:
        raise UserError(
            f"--split {settings.split} chooses among a collection's judgments; a --qrels file is read whole. Leave one"
            " of the two out."
        )
    measures = list(settings.measures or DEFAULT_MEASURES)
    if settings.collection is not None:
        judgments = collection_judgments(settings.collection, settings.split or "test", measures)
    else:
        judgments = file_judgments(str(settings.qrels), measures)
    like: Like = settings.like or "trec"
    conventions = resolve(like, ConventionOverrides())
    paths: dict[str, str] = {}
    labels: dict[str, list[str]] = {}
    for name, several in sources.items():
        labels[name] = [name] if len(several) == 1 else [f"{name}, seed {n}" for n in range(1, len(several) + 1)]
        paths |= {label: source.path for label, source in zip(labels[name], several, strict=True)}
    found = judge_rankings(paths, judgments, measures, conventions)
    runs = {name: [found[label] for label in labels[name]] for name in sources}
    made = {name: made_with(several[0].path) for name, several in sources.items()}
    return Loaded(runs, measures, how_it_was_measured(judgments.name, like, conventions, {}, made))


@dataclass(frozen=True)
class Extremes:
    """The queries on which ``a`` gained most on ``b``, and lost most, with the differences."""

    measure: str
    a: str
    b: str
    won: list[tuple[str, float]]
    lost: list[tuple[str, float]]


@dataclass(frozen=True)
class Compared:
    """The result as plain values, which ``comparisons.json`` holds.

    ``metrics`` and ``comparisons``: as an evaluation has them. ``seeds``: system to measure to the mean of each seed,
    for systems of several. ``texts``: those of the extreme queries, where a collection is known.
    """

    metrics: dict[str, Any]
    comparisons: list[dict[str, Any]]
    seeds: dict[str, dict[str, list[float]]]
    extremes: list[Extremes]
    texts: dict[str, str]
    level: float
    baseline: str | None

    @property
    def evaluated(self) -> Evaluated:
        """As the tables of an evaluation read it."""
        return Evaluated(self.metrics, self.comparisons, self.level)


def compare_sources(settings: ComparisonSettings) -> Compared:
    """Averages seeds, and tests every pair of systems (or every system against the baseline).

    A pair is the later system minus the earlier one. Raises ``UserError`` as ``load`` does.
    """
    loaded = load(settings)
    runs, measures = loaded.runs, loaded.measures
    query_ids = sorted({query for several in runs.values() for run in several for query in run.query_ids})
    runs = {name: [run.over(query_ids) for run in several] for name, several in runs.items()}
    systems = {name: _average(several) for name, several in runs.items()}
    if settings.baseline is None:
        pairs = [(later, earlier) for earlier, later in combinations(systems, 2)]
    else:
        pairs = [(name, settings.baseline) for name in systems if name != settings.baseline]
    comparisons = compare_systems(systems, measures, settings.seed, settings.margin, pairs)
    shown = settings.queries_shown
    extremes = [_extremes(systems[a], systems[b], a, b, measure, shown) for measure in measures for a, b in pairs]
    return Compared(
        metrics=loaded.how | metrics_of(systems, measures),
        comparisons=[asdict(comparison) for comparison in comparisons],
        seeds={
            name: {measure: [run.mean(measure) for run in several] for measure in measures}
            for name, several in runs.items()
            if len(several) > 1
        },
        extremes=extremes,
        texts=_texts(settings.collection, extremes),
        level=settings.level,
        baseline=settings.baseline,
    )


def _average(runs: Sequence[PerQuery]) -> PerQuery:
    """Each query's mean over the runs that it counts for."""
    averaged = {}
    for measure in runs[0].values:
        if all(measure in run.values for run in runs):
            values = np.stack([run.values[measure] for run in runs])
            counted = (~np.isnan(values)).sum(axis=0)
            sums = np.nansum(values, axis=0)
            averaged[measure] = np.divide(sums, counted, out=np.full(len(sums), np.nan), where=counted > 0)
    return replace(runs[0], values=averaged, missing_queries=max(run.missing_queries for run in runs))


def _extremes(system: PerQuery, other: PerQuery, a: str, b: str, measure: str, shown: int) -> Extremes:
    difference = system.values[measure] - other.values[measure]
    ordered = [int(i) for i in np.argsort(-difference, kind="stable") if not np.isnan(difference[i])]
    queries = [(system.query_ids[index], float(difference[index])) for index in ordered]
    won = [item for item in queries[:shown] if item[1] > 0]
    return Extremes(measure, a, b, won, [item for item in queries[::-1][:shown] if item[1] < 0])


def _texts(collection: str | None, extremes: Sequence[Extremes]) -> dict[str, str]:
    if collection is None:
        return {}
    stored = StoredCollection(collection)
    queries = sorted({query for item in extremes for query, _ in item.won + item.lost})
    texts = stored.texts("queries", stored.require("queries", queries))
    return dict(zip(queries, texts, strict=True))


def comparison_lines(compared: Compared) -> list[str]:
    """Means, seeds, differences and tests, the queries won and lost by the first measure, and notes."""
    metrics, evaluated = compared.metrics, compared.evaluated
    lines = [f"{metrics['queries']:,} queries of {metrics['judgments']}", "", *evaluation_lines(evaluated)]
    for table in [*_seed_tables(compared), pair_table(evaluated), *_query_tables(compared)]:
        lines += ["", *(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…" for line in table.lines())]
        lines += ["", *wrap(table.caption, COLUMNS)] if table.caption else []
    return [*lines, "", *note_lines(metrics)]


def write_comparison(compared: Compared, uri: str) -> list[str]:
    """Writes ``comparison.html`` and ``comparisons.json`` into a folder (made if it isn't there); says where."""
    folder, metrics = Folder(uri), compared.metrics
    subtitle = f"Raytriever comparison · {len(metrics['means'])} systems · {metrics['queries']:,} queries"
    section = result_section(compared.evaluated, compared.baseline)
    means, *rest = section.blocks
    queries = [
        Details(f"Queries most won and lost by {_measure(compared)}", table) for table in _query_tables(compared)
    ]
    blocks: list[Block] = [means, *_seed_tables(compared), *rest, *queries]
    folder.write_bytes("comparison.html", render("Comparison", subtitle, [replace(section, blocks=blocks)]).encode())
    folder.write_bytes("comparisons.json", to_strict_json(asdict(compared)))
    return [folder.describe(name) for name in ("comparison.html", "comparisons.json")]


def _measure(compared: Compared) -> str:
    """By which queries are shown."""
    return str(compared.metrics["measures"][0])


def _seed_tables(compared: Compared) -> list[Table]:
    """A row for each system of several seeds and each measure; no table without such systems."""
    rows = [
        [name, measure, f"{len(means)}", f"{np.mean(means):.4f} ± {np.std(means, ddof=1):.4f}"]
        + [f"{end(means):.4f}" for end in (min, max)]
        for name, by_measure in compared.seeds.items()
        for measure, means in by_measure.items()
    ]
    caption = (
        "Systems of several seeds: mean and standard deviation (n - 1) of the seeds' means. All tests take each query's"
        " mean over the seeds."
    )
    header = ["system", "measure", "seeds", "mean", "lowest", "highest"]
    return [Table(header, rows, caption, text_columns=2)] if rows else []


def _query_tables(compared: Compared) -> list[Table]:
    """The queries most won and most lost by each pair of systems; no table where none differs."""
    letter = compared.evaluated.letter
    rows = [
        [f"{letter(item.a) or item.a} - {letter(item.b) or item.b}", signed(difference), query, text]
        for item in compared.extremes
        if item.measure == _measure(compared)
        for query, difference in item.won + item.lost[::-1]
        for text in [" ".join(compared.texts.get(query, "").split())]
    ]
    return [Table(["pair", _measure(compared), "query", "text"], rows, text_columns=4)] if rows else []
