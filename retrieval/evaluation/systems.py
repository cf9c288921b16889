"""Several systems judged by the same queries: means, tests of their differences corrected for their number, a table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.evaluation.conventions import Conventions
from retrieval.evaluation.measures import PerQuery, parse_measure
from retrieval.evaluation.significance import bonferroni, compare, holm

EVALUATION = "evaluation"
TESTS = ("t_test", "permutation", "equivalence", "two_proportions")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COLUMNS = 100  # of a terminal


@dataclass(frozen=True)
class PairComparison:
    """Systems ``a`` and ``b`` on one measure.

    ``details``: the fields of ``significance.Comparison``, p-values as they are. ``holm`` and ``bonferroni``: those of
    each test corrected over all pairs of that measure that it was made for.
    """

    measure: str
    a: str
    b: str
    details: dict[str, Any]
    holm: dict[str, float]
    bonferroni: dict[str, float]


def compare_systems(
    systems: Mapping[str, PerQuery],
    measures: Sequence[str],
    seed: int,
    margin: float,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[PairComparison]:
    """Every pair of systems (or the ``pairs``, as a - b) on every measure, over the queries that count for both.

    Raises ``UserError`` where these are fewer than 2.
    """
    chosen = list(combinations(systems, 2)) if pairs is None else list(pairs)
    found = []
    for measure in measures:
        details = [_compare(systems, a, b, measure, seed, margin) for a, b in chosen]
        holms, bonferronis = ([dict[str, float]() for _ in chosen] for _ in range(2))
        for test in TESTS:
            tested = [pair for pair, detail in enumerate(details) if detail[test]]
            p_values = np.array([details[pair][test]["p_value"] for pair in tested], dtype=np.float64)
            for pair, by_holm, by_bonferroni in zip(tested, holm(p_values), bonferroni(p_values), strict=True):
                holms[pair][test], bonferronis[pair][test] = float(by_holm), float(by_bonferroni)
        for (a, b), *rest in zip(chosen, details, holms, bonferronis, strict=True):
            found.append(PairComparison(measure, a, b, *rest))
    return found


def testable_pairs(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of systems for which at least 2 queries count on every measure; of others there are means alone."""

    def shared(a: str, b: str, measure: str) -> int:
        return len(_shared_values(systems, a, b, measure)[0])

    return [(a, b) for a, b in combinations(systems, 2) if all(shared(a, b, measure) >= 2 for measure in measures)]


def _shared_values(
    systems: Mapping[str, PerQuery], a: str, b: str, measure: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both systems' values of the queries that count for both."""
    first, second = systems[a].values[measure], systems[b].values[measure]
    both = ~(np.isnan(first) | np.isnan(second))
    return first[both], second[both]


def _compare(systems: Mapping[str, PerQuery], a: str, b: str, measure: str, seed: int, margin: float) -> dict[str, Any]:
    first, second = _shared_values(systems, a, b, measure)
    # a mean over seeds of successes is no success
    are_proportions = parse_measure(measure).is_proportion and bool(np.isin([first, second], (0, 1)).all())
    try:
        return asdict(compare(first, second, seed=seed, margin=margin, are_proportions=are_proportions))
    except UserError as error:
        raise UserError(f"'{a}' and '{b}' can't be compared by {measure}: {error}") from error


def metrics_of(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> dict[str, Any]:
    """Means, and the counts that they rest on, as plain JSON values."""
    first = next(iter(systems.values()))
    by_system = ("missing_queries", "unjudged_queries", "self_hits", "depth")
    return {
        "measures": list(measures),
        "queries": len(first.query_ids),
        "queries_without_positive": first.queries_without_positive,
        **{count: {name: getattr(system, count) for name, system in systems.items()} for count in by_system},
        "counted_queries": {
            name: {measure: int((~np.isnan(system.values[measure])).sum()) for measure in measures}
            for name, system in systems.items()
        },
        "means": {name: {measure: system.mean(measure) for measure in measures} for name, system in systems.items()},
    }


def how_it_was_measured(
    judgments: str,
    like: str,
    conventions: Conventions,
    levels: Mapping[str, int],
    made_with: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What else decides the numbers, for metrics.json. ``judgments``: what judged, in words (split 'test')."""
    return {
        "judgments": judgments,
        "like": like,
        "conventions": conventions.model_dump(),
        "relevance_levels": dict(levels) or {"relevant": 1},
        "made_with": {name: dict(system) for name, system in made_with.items()},
    }


def per_query_table(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> pa.Table:
    """A row a query, a column ``system/measure``; null where the query doesn't count."""
    columns: dict[str, Any] = {"query_id": pa.array(next(iter(systems.values())).query_ids, pa.string())}
    for name, system in systems.items():
        for measure in measures:
            columns[f"{name}/{measure}"] = pa.array(system.values[measure], from_pandas=True)
    return pa.table(columns)


def stored_values(evaluation: Artifact) -> dict[str, PerQuery]:
    """The systems of an evaluation artifact, their per-query values and counts."""
    metrics = evaluation.read_json("metrics.json")
    table = pq.read_table(evaluation.path("per_query.parquet"))
    query_ids = tuple(table["query_id"].to_pylist())
    systems = {}
    for name in metrics["means"]:
        values = {m: table[f"{name}/{m}"].to_numpy().astype(np.float64) for m in metrics["measures"]}
        counts = {c: metrics[c][name] for c in ("missing_queries", "unjudged_queries", "self_hits", "depth")}
        systems[name] = PerQuery(
            query_ids, values, queries_without_positive=metrics["queries_without_positive"], **counts
        )
    return systems


def letters_of(names: Sequence[str]) -> dict[str, str]:
    """The letter that stands for each system, as long as there are letters."""
    return dict(zip(names, _LETTERS, strict=False))


def format_table(
    systems: Mapping[str, Mapping[str, float]],
    measures: Sequence[str],
    comparisons: Sequence[Mapping[str, Any]],
    level: float,
) -> list[str]:
    """A plain-text table; letters behind a mean name the systems that it is significantly better than.

    Measures that don't fit beside the others go below.
    """
    names = list(systems)
    letters = letters_of(names)
    width = max(len(name) for name in names) + 4
    marks = {(name, measure): better_than(comparisons, name, measure, level) for name in names for measure in measures}
    column = max([len(measure) for measure in measures] + [7 + len(worse) for worse in marks.values()]) + 2
    at_once = max(1, (_COLUMNS - width) // column)
    lines: list[str] = []
    for start in range(0, len(measures), at_once):
        shown = measures[start : start + at_once]
        lines += [""] if lines else []
        lines.append(" " * width + "".join(measure.ljust(column) for measure in shown).rstrip())
        for name in names:
            cells = [
                f"{systems[name][measure]:.4f} {''.join(letters.get(o, '') for o in marks[name, measure])}"
                for measure in shown
            ]
            row = f"{letters.get(name, ' ')}  {name}".ljust(width) + "".join(cell.ljust(column) for cell in cells)
            lines.append(row.rstrip())
    return lines


def better_than(comparisons: Sequence[Mapping[str, Any]], name: str, measure: str, level: float) -> list[str]:
    """The systems that ``name`` is significantly better than on ``measure`` (paired t-test, Holm-corrected)."""
    worse = []
    for comparison in comparisons:
        if comparison["measure"] != measure or comparison["holm"]["t_test"] >= level:
            continue
        difference = comparison["details"]["mean_difference"]
        if comparison["a"] == name and difference > 0:
            worse.append(str(comparison["b"]))
        if comparison["b"] == name and difference < 0:
            worse.append(str(comparison["a"]))
    return worse


def strict_json(value: Any) -> bytes:
    """JSON that every parser reads, keys in their order: infinite statistics (of constant differences) are strings.

    They are those that ``float`` takes back: "Infinity" and "-Infinity".
    """
    return (json.dumps(_without_infinities(value), indent=1, ensure_ascii=False) + "\n").encode()


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
