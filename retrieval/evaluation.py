"""Several systems judged by the same qrels: means, paired tests corrected for their number, and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from raytriever.retrieval.measures import PerQuery
from raytriever.retrieval.significance import compare, holm

EVALUATION = "evaluation"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class PairComparison:
    """Systems ``a`` and ``b`` on one measure; ``t_test_holm`` is corrected over all pairs of that measure."""

    measure: str
    a: str
    b: str
    t_test_holm: float
    details: dict[str, Any]

    def is_significant(self, level: float) -> bool:
        """Whether the paired t-test rejects equal means at ``level`` after Holm's correction."""
        return self.t_test_holm < level


def compare_systems(
    systems: Mapping[str, PerQuery], measures: Sequence[str], seed: int, margin: float
) -> list[PairComparison]:
    """Every pair of systems on every measure (a paired t-test, a permutation test, TOST, an interval)."""
    found = []
    for measure in measures:
        pairs = list(combinations(systems, 2))
        results = [
            compare(systems[a].values[measure], systems[b].values[measure], seed=seed, margin=margin) for a, b in pairs
        ]
        corrected = holm(np.array([result.t_test.p_value for result in results], dtype=np.float64))
        for (a, b), result, p_value in zip(pairs, results, corrected, strict=True):
            found.append(PairComparison(measure, a, b, float(p_value), asdict(result)))
    return found


def format_table(
    systems: Mapping[str, Mapping[str, float]],
    measures: Sequence[str],
    comparisons: Sequence[Mapping[str, Any]],
    level: float,
) -> list[str]:
    """A plain-text table; letters behind a mean name the systems that it is significantly better than."""
    names = list(systems)
    letters = dict(zip(names, _LETTERS, strict=False))
    width = max(len(name) for name in names) + 4
    marks = {(name, measure): better_than(comparisons, name, measure, level) for name in names for measure in measures}
    column = max([len(measure) for measure in measures] + [7 + len(worse) for worse in marks.values()]) + 2
    lines = [" " * width + "".join(measure.ljust(column) for measure in measures).rstrip()]
    for name in names:
        cells = [
            f"{systems[name][measure]:.4f} {''.join(letters.get(o, '') for o in marks[name, measure])}".ljust(column)
            for measure in measures
        ]
        lines.append(f"{letters.get(name, ' ')}  {name}".ljust(width) + "".join(cells).rstrip())
    return lines


def better_than(comparisons: Sequence[Mapping[str, Any]], name: str, measure: str, level: float) -> list[str]:
    """The systems that ``name`` is significantly better than on ``measure``."""
    worse = []
    for comparison in comparisons:
        if comparison["measure"] != measure or comparison["t_test_holm"] >= level:
            continue
        difference = comparison["details"]["mean_difference"]
        if comparison["a"] == name and difference > 0:
            worse.append(str(comparison["b"]))
        if comparison["b"] == name and difference < 0:
            worse.append(str(comparison["a"]))
    return worse
