"""An evaluation's means once more over the queries of each domain: as data, as lines, and as a table of the report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.evaluation.measures import PerQuery
from raytriever.retrieval.plain_text import aligned
from raytriever.retrieval.report import Table

DOMAINS = "domains.json"
_MOST_SHOWN = 12
_COLUMNS = 100  # of a terminal

Domains = Mapping[str, Mapping[str, Any]]
"""What domains.json holds: for each domain its ``queries``, ``counted_queries`` and ``runs``, those of most first."""


def domains_of(collection: StoredCollection, query_ids: Sequence[str]) -> list[str]:
    """The domain of each query, '' where it has none. Raises ``UserError`` for a query that is not there."""
    domains = collection.rows_of("queries").take(collection.query_rows(query_ids), ["domain"])
    names: list[str] = domains["domain"].to_pylist()
    return names


def domain_means(
    systems: Mapping[str, PerQuery], measures: Sequence[str], domains: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Of each domain the number of its queries, and every run's mean of every measure over those that count.

    ``domains[i]``: of query i of each system, whose queries are the same. ``counted_queries``: how many count, by run
    and measure; weighted by them the means of all domains give the overall mean. None: of the domain none counts.
    """
    # objects: NumPy's own strings lose NULs at their end
    names, numbers, sizes = np.unique(np.array(domains, dtype=object), return_inverse=True, return_counts=True)
    rows_of = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
    found = {}
    for number in sorted(range(len(names)), key=lambda number: (-sizes[number], names[number])):
        counts: dict[str, dict[str, int]] = {name: {} for name in systems}
        means: dict[str, dict[str, float | None]] = {name: {} for name in systems}
        for name, system in systems.items():
            for measure in measures:
                values = system.values[measure][rows_of[number]]
                values = values[~np.isnan(values)]
                counts[name][measure] = len(values)
                means[name][measure] = float(values.mean()) if len(values) else None
        found[str(names[number])] = {"queries": int(sizes[number]), "counted_queries": counts, "runs": means}
    return found


def domain_lines(domains: Domains, measure: str) -> list[str]:
    """A plain-text table of one measure: a row for each run, a column for each domain, those of most queries.

    Domains that don't fit beside the others go below.
    """
    lines = ["", f"{measure} by domain"]
    rows = _rows(domains, measure)
    width = max(len(row[0]) for row in rows)
    widest = max(len(cell) for row in rows for cell in row[1:]) + 2
    at_once = max(1, (_COLUMNS - width) // widest)
    for start in range(1, len(rows[0]), at_once):
        block = [[row[0], *row[start : start + at_once]] for row in rows]
        lines += ["", *aligned(block, "<" + ">" * (len(block[0]) - 1))]
    if left_out := _left_out(domains):
        lines += ["", left_out]
    return lines


def domain_table(domains: Domains, measure: str) -> Table:
    """The same table for the report."""
    header, *rows = _rows(domains, measure)
    caption = f"{measure} over the queries of each domain (mean; how many queries in the first row)."
    return Table(["system", *header[1:]], rows, " ".join(text for text in (caption, _left_out(domains)) if text))


def _rows(domains: Domains, measure: str) -> list[list[str]]:
    """The header, the numbers of queries, and a row for each run."""
    shown = list(domains)[:_MOST_SHOWN]
    runs = domains[shown[0]]["runs"]
    means = [[run, *(_mean(domains[name]["runs"][run][measure]) for name in shown)] for run in runs]
    return [
        ["", *(name or "(none)" for name in shown)],
        ["queries", *(f"{domains[name]['queries']:,}" for name in shown)],
        *means,
    ]


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _left_out(domains: Domains) -> str:
    if len(domains) <= _MOST_SHOWN:
        return ""
    return f"The {_MOST_SHOWN} domains with most queries, of {len(domains):,}; {DOMAINS} has them all."
