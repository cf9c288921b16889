"""The report's section on an evaluation: means, differences from a baseline with intervals, every pair of systems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytriever.reports.plots import Interval, interval_panels
from raytriever.reports.report import Block, Details, Plot, Section
from raytriever.reports.table import Cell, Table
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.measures import PerQuery, convention_lines, notes
from retrieval.evaluation.systems import better_than, letters_of

# An evaluation's means once more over the queries of each domain: as data, as lines, and as a table of the report.

DOMAINS = "domains.json"
_MOST_SHOWN = 12

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
    lines += ["", *Table(rows[0], rows[1:]).lines()]
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


Comparison = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation artifact as plain values: metrics.json, comparisons.json and two of its settings.

    ``domains``: domains.json, None where it wasn't evaluated by domain.
    """

    metrics: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    measures: Sequence[str]
    significance_level: float
    domains: Domains | None = None

    @property
    def systems(self) -> list[str]:
        """Names in the order of the evaluation."""
        return list(self.metrics["means"])

    @property
    def letters(self) -> dict[str, str]:
        """The letter that stands for each system, as long as there are letters."""
        return letters_of(self.systems)

    def mean(self, system: str, measure: str) -> float:
        """The mean over queries."""
        return float(self.metrics["means"][system][measure])


@dataclass(frozen=True)
class Difference:
    """``system`` minus ``baseline`` on one measure; p-values corrected by Holm's method, where nothing else is said."""

    measure: str
    system: str
    baseline: str
    difference: float
    low: float
    high: float
    effect_size: float
    t_test: float
    t_test_bonferroni: float
    permutation: float
    equivalence: float
    wins: int
    ties: int
    losses: int


def difference_from(comparison: Comparison, baseline: str) -> Difference:
    """The comparison seen from ``baseline``, one of its two systems: its sign turned where that is system a."""
    details = comparison["details"]
    low, high = details["interval"]
    turned = comparison["a"] == baseline
    sign = -1.0 if turned else 1.0
    if turned:
        low, high = -high, -low
    return Difference(
        measure=comparison["measure"],
        system=comparison["b"] if turned else comparison["a"],
        baseline=baseline,
        difference=sign * details["mean_difference"],
        low=low,
        high=high,
        effect_size=sign * float(details["effect_size"]),
        t_test=comparison["holm"]["t_test"],
        t_test_bonferroni=comparison["bonferroni"]["t_test"],
        permutation=comparison["holm"]["permutation"],
        equivalence=comparison["holm"]["equivalence"],
        wins=details["losses"] if turned else details["wins"],
        ties=details["ties"],
        losses=details["wins"] if turned else details["losses"],
    )


def result_section(evaluated: Evaluated, baseline: str | None = None) -> Section:
    """The evaluation's table and, of several systems, their differences from ``baseline`` (None: the first)."""
    blocks: list[Block] = [_means_table(evaluated)]
    if evaluated.domains:
        blocks.append(domain_table(evaluated.domains, evaluated.measures[0]))
    blocks += [text for text in [" ".join(notes(evaluated.metrics))] if text]
    if evaluated.comparisons:
        blocks += _difference_blocks(evaluated, baseline or evaluated.systems[0])
    blocks.append(_conventions(evaluated))
    return Section("Result", _lead(evaluated), blocks)


def _lead(evaluated: Evaluated) -> str:
    metrics, measure = evaluated.metrics, evaluated.measures[0]
    opening = (
        f"How well each system ranks the documents of {metrics['queries']:,} queries of {metrics['judgments']}"
        " (mean over queries; higher is better)."
    )
    systems = evaluated.systems
    if not evaluated.comparisons:
        return opening
    best = max(systems, key=lambda name: evaluated.mean(name, measure))
    beaten = better_than(evaluated.comparisons, best, measure, evaluated.significance_level)
    tested = {c["b"] if c["a"] == best else c["a"] for c in evaluated.comparisons if best in (c["a"], c["b"])}
    level = [name for name in systems if name in tested and name not in beaten]
    sentence = f" By {measure}, '{best}' has the highest mean ({evaluated.mean(best, measure):.4f})"
    if beaten:
        sentence += f", significantly above {_listed(beaten)}"
    if level:
        sentence += f"{';' if beaten else ','} the test does not tell it apart from {_listed(level)}"
    return f"{opening}{sentence}."


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _means_table(evaluated: Evaluated) -> Table:
    systems, level = evaluated.systems, evaluated.significance_level
    letters = evaluated.letters
    best = {measure: f"{max(evaluated.mean(name, measure) for name in systems):.4f}" for measure in evaluated.measures}
    rows = []
    for name in systems:
        row: list[str | Cell] = [letters.get(name, ""), name]
        for measure in evaluated.measures:
            value = f"{evaluated.mean(name, measure):.4f}"
            worse = better_than(evaluated.comparisons, name, measure, level)
            marks = "".join(letters.get(other, "") for other in worse)
            row.append(Cell(value, marks, is_strong=len(systems) > 1 and value == best[measure]))
        rows.append(row)
    caption = ""
    if evaluated.comparisons:
        caption = (
            f"Letters: significantly better than that system (paired t-test, two-sided, p < {level:g} after Holm's"
            " correction over all pairs of systems of the measure). Bold: the highest mean of the measure."
        )
    return Table(["", "system", *evaluated.measures], rows, caption, text_columns=2)


def _conventions(evaluated: Evaluated) -> Details:
    rows = [[name, value] for name, value in convention_lines(evaluated.metrics)]
    caption = "Switches by which evaluation tools differ, by their names in the settings; below, how each run was made."
    table = Table(["convention", "as it was followed"], rows, caption, text_columns=2)
    return Details(f"Conventions: those of {evaluated.metrics['like']}, where nothing else was set", table)


def _difference_blocks(evaluated: Evaluated, baseline: str) -> list[Block]:
    level, comparisons = evaluated.significance_level, evaluated.comparisons
    differences = [difference_from(c, baseline) for c in comparisons if baseline in (c["a"], c["b"])]
    first = comparisons[0]["details"]
    confidence = f"{first['confidence']:.0%}"
    panels = {
        measure: [
            Interval(d.system, d.difference, d.low, d.high, d.t_test < level)
            for d in differences
            if d.measure == measure
        ]
        for measure in evaluated.measures
    }
    svg = interval_panels(panels, f"difference from '{baseline}'", "Differences of the means from the baseline")
    caption = (
        f"Mean difference from '{baseline}' with its {confidence} bootstrap interval over queries. Filled:"
        f" significant at {level:g} (paired t-test, Holm-corrected); hollow: not. Tests and intervals speak of the"
        " choice of queries; how much another training seed would change is not in them."
    )
    every_pair = _all_pairs(evaluated, float(first["margin"]))
    return [Plot(svg, caption), _difference_table(evaluated, differences, baseline), every_pair]


def _difference_table(evaluated: Evaluated, differences: Sequence[Difference], baseline: str) -> Table:
    first = evaluated.comparisons[0]["details"]
    margin = f"p, within ± {first['margin']:g}"
    header = ["measure", "system", "difference", f"{first['confidence']:.0%} interval", "p, t-test", "p, permutation"]
    rows = [
        [
            d.measure,
            d.system,
            signed(d.difference),
            f"{signed(d.low)} to {signed(d.high)}",
            _p_value(d.t_test),
            _p_value(d.permutation),
            _p_value(d.equivalence),
            f"{d.wins:,}",
            f"{d.ties:,}",
            f"{d.losses:,}",
        ]
        for measure in evaluated.measures
        for d in differences
        if d.measure == measure
    ]
    counts = sorted({f"{c['details']['queries']:,}" for c in evaluated.comparisons})
    caption = (
        f"Differences from '{baseline}' over {' or '.join(counts)} paired queries. All p-values are corrected by Holm's"
        f" method; the intervals are not. {margin}: two one-sided t-tests, small where the systems are equivalent."
        " Wins, ties and losses count queries on which the system is above, equal to and below the baseline."
    )
    return Table([*header, margin, "wins", "ties", "losses"], rows, caption, text_columns=2)


def _all_pairs(evaluated: Evaluated, margin: float) -> Details:
    rows, letters = [], evaluated.letters
    has_proportions = any(comparison["details"]["two_proportions"] for comparison in evaluated.comparisons)
    for comparison in evaluated.comparisons:
        d = difference_from(comparison, comparison["a"])
        row = [
            d.measure,
            f"{letters.get(d.system, d.system)} - {letters.get(d.baseline, d.baseline)}",
            signed(d.difference),
            f"{signed(d.low)} to {signed(d.high)}",
            signed(d.effect_size, 2),
            _p_value(d.t_test),
            _p_value(d.t_test_bonferroni),
            _p_value(d.permutation),
            _p_value(d.equivalence),
        ]
        if has_proportions:
            of_proportions = comparison["holm"].get("two_proportions")
            row.append("" if of_proportions is None else _p_value(of_proportions))
        rows.append(row)
    header = ["measure", "systems", "difference", "interval", "effect d_z", "p, t-test", "by Bonferroni"]
    header += ["p, permutation", f"p, within ± {margin:g}"]
    caption = (
        "Letters as in the first table. p-values are corrected over the pairs of a measure, by Holm's method; the"
        f" t-test's by Bonferroni's too. p, within ± {margin:g}: two one-sided t-tests of equivalence."
    )
    if has_proportions:
        header.append("p, two proportions")
        caption += " p, two proportions: z-test of shares of queries, unpaired."
    return Details("Every pair of systems", Table(header, rows, caption, text_columns=2))


def signed(value: float, digits: int = 4) -> str:
    """A difference, its sign always shown."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no negative zero


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
