"""The report's section on an evaluation: means, differences from a baseline with intervals, every pair of systems."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytriever.retrieval.evaluation import better_than
from raytriever.retrieval.plots import Interval, interval_panels
from raytriever.retrieval.report import Block, Cell, Details, Plot, Section, Table

Comparison = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation artifact as plain values: metrics.json, comparisons.json and two of its settings."""

    metrics: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    measures: Sequence[str]
    significance_level: float

    @property
    def systems(self) -> list[str]:
        """Names in the order of the evaluation."""
        return list(self.metrics["means"])

    @property
    def letters(self) -> dict[str, str]:
        """The letter that stands for each system, as long as there are letters."""
        return dict(zip(self.systems, string.ascii_lowercase, strict=False))

    def mean(self, system: str, measure: str) -> float:
        """The mean over queries."""
        return float(self.metrics["means"][system][measure])


@dataclass(frozen=True)
class Difference:
    """``system`` minus ``baseline`` on one measure."""

    measure: str
    system: str
    baseline: str
    difference: float
    low: float
    high: float
    effect_size: float
    t_test_holm: float
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
        effect_size=sign * details["effect_size"],
        t_test_holm=comparison["t_test_holm"],
        permutation=details["permutation"]["p_value"],
        equivalence=details["equivalence"]["p_value"],
        wins=details["losses"] if turned else details["wins"],
        ties=details["ties"],
        losses=details["wins"] if turned else details["losses"],
    )


def result_section(evaluated: Evaluated, baseline: str | None = None) -> Section:
    """The evaluation's table and, of several systems, their differences from ``baseline`` (None: the first)."""
    blocks: list[Block] = [_means_table(evaluated)]
    blocks += [text for text in [_missing(evaluated)] if text]
    if len(evaluated.systems) > 1:
        blocks += _difference_blocks(evaluated, baseline or evaluated.systems[0])
    return Section("Result", _lead(evaluated), blocks)


def _lead(evaluated: Evaluated) -> str:
    metrics, measure = evaluated.metrics, evaluated.measures[0]
    opening = (
        f"How well each system ranks the documents of {metrics['queries']:,} queries of split '{metrics['split']}'"
        " (mean over queries; higher is better)."
    )
    systems = evaluated.systems
    if len(systems) == 1:
        return opening
    best = max(systems, key=lambda name: evaluated.mean(name, measure))
    beaten = better_than(evaluated.comparisons, best, measure, evaluated.significance_level)
    level = [name for name in systems if name != best and name not in beaten]
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


def _missing(evaluated: Evaluated) -> str:
    metrics = evaluated.metrics
    parts = [
        f"'{name}' returned nothing for {count:,} judged queries, which count 0."
        for name, count in metrics["missing_queries"].items()
        if count
    ]
    if metrics["queries_without_positive"]:
        parts.append(f"{metrics['queries_without_positive']:,} queries without a relevant document are left out.")
    return " ".join(parts)


def _difference_blocks(evaluated: Evaluated, baseline: str) -> list[Block]:
    level, comparisons = evaluated.significance_level, evaluated.comparisons
    differences = [difference_from(c, baseline) for c in comparisons if baseline in (c["a"], c["b"])]
    first = comparisons[0]["details"]
    confidence = f"{first['confidence']:.0%}"
    panels = {
        measure: [
            Interval(d.system, d.difference, d.low, d.high, d.t_test_holm < level)
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
    blocks: list[Block] = [Plot(svg, caption), _difference_table(evaluated, differences, baseline, confidence)]
    if len(evaluated.systems) > 2:
        blocks.append(_all_pairs(evaluated, float(first["margin"])))
    return blocks


def _difference_table(evaluated: Evaluated, differences: Sequence[Difference], baseline: str, confidence: str) -> Table:
    header = ["measure", "system", "difference", f"{confidence} interval", "p, t-test", "p, permutation"]
    rows = [
        [
            d.measure,
            d.system,
            _signed(d.difference),
            f"{_signed(d.low)} to {_signed(d.high)}",
            _p_value(d.t_test_holm),
            _p_value(d.permutation),
            f"{d.wins:,}",
            f"{d.ties:,}",
            f"{d.losses:,}",
        ]
        for measure in evaluated.measures
        for d in differences
        if d.measure == measure
    ]
    caption = (
        f"Differences from '{baseline}', {evaluated.metrics['queries']:,} paired queries. The t-test's p-values are"
        " corrected by Holm's method; the permutation test's and the intervals are not. Wins, ties and losses count"
        " queries on which the system is above, equal to and below the baseline."
    )
    return Table([*header, "wins", "ties", "losses"], rows, caption, text_columns=2)


def _all_pairs(evaluated: Evaluated, margin: float) -> Details:
    rows, letters = [], evaluated.letters
    for comparison in evaluated.comparisons:
        d = difference_from(comparison, comparison["a"])
        rows.append(
            [
                d.measure,
                f"{letters.get(d.system, d.system)} - {letters.get(d.baseline, d.baseline)}",
                _signed(d.difference),
                f"{_signed(d.low)} to {_signed(d.high)}",
                _signed(d.effect_size, 2),
                _p_value(d.t_test_holm),
                _p_value(d.permutation),
                _p_value(d.equivalence),
            ]
        )
    header = ["measure", "systems", "difference", "interval", "effect d_z", "p, t-test", "p, permutation"]
    caption = (
        "Letters as in the first table. p, t-test: corrected by Holm's method over the pairs of a measure; the others"
        f" are not corrected. p, equivalence: two one-sided t-tests that the mean difference lies within ± {margin:g}."
    )
    return Details("Every pair of systems", Table([*header, "p, equivalence"], rows, caption, text_columns=2))


def _signed(value: float, digits: int = 4) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no negative zero


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
