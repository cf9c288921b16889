"""What a reader must know beside an evaluation's numbers: which queries count, and which conventions were followed."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from raytriever.retrieval.evaluation.conventions import describe_system, title_warning
from raytriever.retrieval.evaluation.measures import parse_measure

Metrics = Mapping[str, Any]

_COLUMNS = 100
_COUNTED = {"count_as_zero": "counted 0", "leave_out": "left out of its means"}


def notes(metrics: Metrics) -> list[str]:
    """A sentence for everything that may make a number another one than the reader expects; ``metrics.json`` in."""
    conventions = metrics["conventions"]
    found = []
    if count := metrics["queries_without_positive"]:
        what = "counted 0" if conventions["queries_without_positives"] == "count_as_zero" else "left out"
        found.append(f"{_queries(count)} without a relevant document: {what}.")
    for name, count in metrics["missing_queries"].items():
        if count:
            found.append(f"'{name}' lacks {_queries(count)}, {_COUNTED[conventions['missing_queries']]}.")
    by_answers = any(parse_measure(name).by_answers for name in metrics["measures"])
    for name, count in metrics["unjudged_queries"].items():
        if count:
            left_out = "left out where judgments are needed" if by_answers else "left out"
            found.append(f"'{name}' has {_queries(count)} without judgments, {left_out}.")
    is_mteb = metrics["like"] == "mteb"
    for name, count in metrics["self_hits"].items():
        if count:
            kept = "kept" if conventions["self_hits"] == "keep" else "removed"
            exception = " (MTEB removes them for single tasks, such as ArguAna and Quora)" if is_mteb else ""
            found.append(f"'{name}' has {count:,} results whose id is the query's own: {kept}{exception}.")
    found += _shallow_runs(metrics) + _uncounted(metrics)
    for name, system in metrics["made_with"].items():
        warning = title_warning(name, system, conventions["title"], metrics["like"])
        found += [warning] if warning else []
    return found


def _shallow_runs(metrics: Metrics) -> list[str]:
    deepest = max((parse_measure(name).cutoff or 0 for name in metrics["measures"]), default=0)
    return [
        f"'{name}' has at most {depth:,} documents a query; a measure's cutoff of {deepest:,} sees no more."
        for name, depth in metrics["depth"].items()
        if 0 < depth < deepest
    ]


def _uncounted(metrics: Metrics) -> list[str]:
    """Measures that not all queries count for, for another reason than that the run lacks them."""
    most: dict[str, int] = {}
    for counted in metrics["counted_queries"].values():
        for measure, count in counted.items():
            most[measure] = max(count, most.get(measure, 0))
    return [
        f"{measure} is over {count:,} of the {metrics['queries']:,} queries."
        for measure, count in most.items()
        if count < metrics["queries"]
    ]


def convention_lines(metrics: Metrics) -> list[tuple[str, str]]:
    """Every switch by its name in the settings and how it was set, then each system's title and prompts."""
    levels = ", ".join(f"{name} from grade {level} on" for name, level in metrics["relevance_levels"].items())
    return [
        *((name, str(value)) for name, value in metrics["conventions"].items()),
        ("relevance_levels", levels),
        *((f"'{name}'", describe_system(system)) for name, system in metrics["made_with"].items()),
    ]


def note_lines(metrics: Metrics) -> list[str]:
    """Notes and conventions for a terminal."""
    lines = [line for note in notes(metrics) for line in wrap(f"Note: {note}", _COLUMNS, subsequent_indent="  ")]
    lines.append(f"Conventions of {metrics['like']}, where nothing else was set:")
    return [*lines, *(f"  {name}: {value}" for name, value in convention_lines(metrics))]


def _queries(count: int) -> str:
    return "1 query" if count == 1 else f"{count:,} queries"
