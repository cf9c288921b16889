"""`raytriever compare`: systems tested against one another query by query, from evaluations or from runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.evaluation.answer_accuracy import rows_by_id
from raytriever.retrieval.evaluation.comparison_sources import ComparisonSettings, load
from raytriever.retrieval.evaluation.measures import PerQuery
from raytriever.retrieval.evaluation.systems import compare_systems, metrics_of, strict_json


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
