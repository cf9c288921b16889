"""`raytriever compare`: systems tested against one another query by query, from evaluations or from runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from raytriever.artifacts.artifact import Artifact, is_artifact, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, did_you_mean
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.answers import rows_by_id
from retrieval.evaluation.conventions import ConventionOverrides, Like, resolve
from retrieval.evaluation.judging import collection_judgments, file_judgments, judge_runs, made_with
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.systems import (
    EVALUATION,
    compare_systems,
    how_it_was_measured,
    metrics_of,
    stored_values,
    strict_json,
)

# What `raytriever compare` is asked for, and the per-query values that its arguments name.

_DEFAULT_MEASURES = ("nDCG@10", "RR@10", "R@100")


class ComparisonSettings(Settings):
    """What is compared: ``[NAME=]EVALUATION[:SYSTEM]``, or ``[NAME=]RUN`` with what judges it.

    ``seeds``: ``NAME=A,B,…``, runs of one system that differ in the training seed; their values are averaged.
    """

    systems: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    collection: str | None = None
    qrels: str | None = None
    split: str | None = None  # None: test
    measures: tuple[str, ...] = ()  # none: those of the evaluations
    like: Like | None = None  # none: that of the evaluations, else trec
    baseline: str | None = None  # with one, only pairs with it are tested
    margin: float = Field(default=0.05, gt=0)
    level: float = Field(default=0.05, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)
    queries_shown: int = Field(default=3, ge=0)


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
        sources = _sources_at(rest)
        if name is not None and len(sources) > 1:
            systems = ", ".join(str(source.system) for source in sources)
            raise UserError(f"{rest} has {len(sources)} systems: {systems}. Choose one: {name}={rest}:SYSTEM.")
        for source in sources:
            path = Path(source.path.rstrip("/"))
            add(name or source.system or (path.name if is_artifact(source.path) else path.stem), [source])
    for argument in settings.seeds:
        name, rest = _name_and_rest(argument)
        if name is None:
            raise UserError(f"--seeds {argument!r} is not of the form NAME=A,B,C.")
        items = _listed(rest, f"--seeds {name}")
        each = [_sources_at(item) for item in items]
        for item, sources in zip(items, each, strict=True):
            if len(sources) > 1:
                raise UserError(f"--seeds {name}: {item} has {len(sources)} systems. Choose one: {item}:SYSTEM.")
        add(name, [source for sources in each for source in sources])
    return found


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


def _listed(text: str, where: str) -> list[str]:
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
    return Artifact(path).kind == EVALUATION and system in Artifact(path).read_json("metrics.json")["means"]


def _path_and_system(text: str) -> tuple[str, str]:
    path, _, system = text.rpartition(":")
    return (text, "") if is_artifact(text) or not path or not is_artifact(path) else (path, system)


def _sources_at(text: str) -> list[_Source]:
    path, system = _path_and_system(text)
    if is_artifact(path) and Artifact(path).kind == EVALUATION:
        systems = list(Artifact(path).read_json("metrics.json")["means"])
        if system and system not in systems:
            raise UserError(f"{path} did not evaluate '{system}'.{did_you_mean(system, systems)}")
        return [_Source(path, name) for name in systems if not system or name == system]
    if system or not (is_artifact(path) or Path(path).is_file()):
        raise UserError(f"{text!r} is no evaluation, no run artifact and no run file. Is the path right?")
    return [_Source(path)]


def _evaluated(settings: ComparisonSettings, sources: dict[str, list[_Source]]) -> Loaded:
    """Values as evaluations have stored them; refused where these were not made alike."""
    artifacts = {source.path: Artifact(source.path, EVALUATION) for several in sources.values() for source in several}
    metrics = {path: artifact.read_json("metrics.json") for path, artifact in artifacts.items()}
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
    stored = {path: stored_values(artifact) for path, artifact in artifacts.items()}
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
    measures = list(settings.measures or _DEFAULT_MEASURES)
    if settings.collection is not None:
        judgments = collection_judgments(settings.collection, settings.split or "test", measures)
    else:
        judgments = file_judgments(str(settings.qrels), measures)
    like: Like = settings.like or "trec"
    conventions = resolve(like, ConventionOverrides())
    labels = {
        name: [name] if len(several) == 1 else [f"{name}, seed {number}" for number in range(1, len(several) + 1)]
        for name, several in sources.items()
    }
    paths = {
        label: source.path
        for name, several in sources.items()
        for label, source in zip(labels[name], several, strict=True)
    }
    found = judge_runs(paths, judgments, measures, conventions)
    runs = {name: [found[label] for label in labels[name]] for name in sources}
    made = {name: made_with(several[0].path) for name, several in sources.items()}
    judges = f"split '{settings.split or 'test'}'" if settings.collection is not None else "the qrels file"
    return Loaded(runs, measures, how_it_was_measured(judges, like, conventions, {}, made))


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
    """The result as plain values: ``metrics`` and ``comparisons`` as an evaluation has them.

    ``seeds``: system to measure to the mean of each seed, for systems of several. ``texts``: those of the extreme
    queries, where a collection is known.
    """

    metrics: dict[str, Any]
    comparisons: list[dict[str, Any]]
    seeds: dict[str, dict[str, list[float]]]
    extremes: list[Extremes]
    texts: dict[str, str]
    level: float
    baseline: str | None

    def to_json(self) -> bytes:
        """What is written as ``comparisons.json``."""
        return strict_json(asdict(self))


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
    row_of = rows_by_id(stored, "queries", set(queries))
    texts = stored.texts("queries", np.array([row_of[query] for query in queries], dtype=np.int64))
    return dict(zip(queries, texts, strict=True))
