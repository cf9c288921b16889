"""The tables and the chart of the trials: ``python -m benchmarks.head_to_head.page /tmp/head-to-head/trials.jsonl``.

Which way stands for a side is decided on dev queries: the one with the best mean over the six collections. Differences
are ours less theirs on test queries. Queries and seeds are both samples, so the variance of a difference is that of its
queries' means plus that of its seeds' means; intervals and p-values are Student's with the degrees of freedom of Welch
and Satterthwaite. p-values are corrected by Holm's method over the rows of a table. The mixture is made of the six
collections, so it is no part of their mean.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import stats

from benchmarks.chart import chart
from benchmarks.head_to_head.data import COLLECTIONS, MIXTURE, UNSEEN
from benchmarks.head_to_head.plan import KNOWN, MORE_EPOCHS, STUDENTS, stored_rows
from benchmarks.head_to_head.ways import WAYS
from raytriever.reports.plots import BLUE, INK
from retrieval.evaluation.significance import holm

VIEWS = ("data", "seconds")
_MEAN = "mean"
_IN_CHART = {MIXTURE: "all six in one", _MEAN: "mean of six"}

Finals = dict[tuple[str, str], dict[int, Mapping[str, Any]]]
"""By collection and way: the row of each seed."""


class Difference(NamedTuple):
    """Ours less theirs, its 95 % interval, and p."""

    collection: str
    theirs: float
    ours: float
    low: float
    high: float
    p_value: float


class Part(NamedTuple):
    """A variance, and its degrees of freedom."""

    variance: float
    freedom: int


def finals(rows: Sequence[Mapping[str, Any]], student: str, view: str, seeds: range) -> Finals:
    """The final rows of the ways that have all ``seeds``.

    In more epochs there are no others. Of equal seconds: a way that takes the reference's time anyway has its rows of
    equal data. A way for several domains has the rows of its simple form on collections of one.
    """
    found: Finals = defaultdict(dict)
    for purpose in ("data", view) if view in VIEWS else (view,):
        for row in rows:
            if row["student"] == student and row["purpose"] == purpose and row["seed"] in seeds:
                found[row["collection"], row["way"]][row["seed"]] = row
    for way, what in WAYS.items():
        for collection in COLLECTIONS if what.without_domains else ():
            if (collection, what.without_domains) in found:
                found[collection, way] = found[collection, str(what.without_domains)]
    return {named: of_seeds for named, of_seeds in found.items() if len(of_seeds) == len(seeds)}


def is_whole(found: Finals) -> bool:
    """Whether each side has a way that was tried on the six collections."""
    whole = [way for way in WAYS if all((each, way) in found for each in COLLECTIONS)]
    return {WAYS[way].side for way in whole} == {"theirs", "ours"}


def chosen(found: Finals, side: str, collections: Sequence[str]) -> str:
    """The side's way with the best mean on dev queries, over the ways that have been tried on all collections.

    A way that diverged is not chosen.
    """

    def dev(way: str) -> float:
        return float(np.mean([_mean(found, collection, way, "dev") for collection in collections]))

    ways = [way for way in WAYS if WAYS[way].side == side and all((each, way) in found for each in collections)]
    return max((way for way in ways if np.isfinite(dev(way))), key=dev)


def differences(found: Finals, theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[Difference]:
    """A row a collection, and the mean without the mixture. ``theirs``, ``ours``: a side's way, by collection."""
    parts, means = list[list[Part]](), list[list[float]]()
    single = [place for place, collection in enumerate(theirs) if collection != MIXTURE]
    for collection in theirs:
        of_theirs, of_ours = (_of_queries(found[collection, side[collection]]) for side in (theirs, ours))
        parts.append(variances(of_ours - of_theirs))
        means.append([float(of_theirs.mean()), float(of_ours.mean())])
    parts.append([Part(part.variance / len(single) ** 2, part.freedom) for place in single for part in parts[place]])
    means.append(np.mean([means[place] for place in single], axis=0).tolist())
    tests = [student(mine - other, of_row) for (other, mine), of_row in zip(means, parts, strict=True)]
    corrected = holm(np.array([p_value for *_, p_value in tests])).tolist()
    named = zip((*theirs, _MEAN), means, tests, corrected, strict=True)
    return [Difference(name, other, mine, low, high, p_value) for name, (other, mine), (low, high, _), p_value in named]


def variances(values: NDArray[np.float64]) -> list[Part]:
    """Of the mean of ``values`` (seeds, queries): what queries bring, and what seeds bring."""
    parts = []
    for axis in (0, 1):
        means = values.mean(axis=axis)
        if len(means) > 1:
            parts.append(Part(float(means.var(ddof=1)) / len(means), len(means) - 1))
    return parts


def student(difference: float, parts: Sequence[Part]) -> tuple[float, float, float]:
    """The 95 % interval of a difference whose variance is the sum of ``parts``, and p that it is 0."""
    variance = sum(part.variance for part in parts)
    if variance == 0:
        return difference, difference, float(difference == 0)
    freedom = variance**2 / sum(part.variance**2 / part.freedom for part in parts)
    error = np.sqrt(variance)
    half = float(stats.t.ppf(0.975, freedom) * error)
    return difference - half, difference + half, float(2 * stats.t.sf(abs(difference) / error, freedom))


def _of_queries(of_seeds: Mapping[int, Mapping[str, Any]]) -> NDArray[np.float64]:
    """(seeds, queries), seeds in order."""
    return np.array([of_seeds[seed]["of_queries"] for seed in sorted(of_seeds)], dtype=np.float64)


def _mean(found: Finals, collection: str, way: str, field: str) -> float:
    return float(np.mean([row.get(field, np.nan) for row in found[collection, way].values()]))


def show(rows: Sequence[Mapping[str, Any]], student: str, view: str, seeds: range) -> list[Difference]:
    """Prints all ways by collection, then the ways that stand for their sides, whose differences it returns."""
    first: list[Difference] = []
    found = finals(rows, student, view, seeds)
    collections = [each for each in (*COLLECTIONS, MIXTURE) if any(each == tried for tried, _ in found)]
    print(f"\n## {student}, equal {view}\n")
    print("| way | dev | " + " | ".join([*collections, _MEAN]) + " | seconds | preparing |")
    print("|---" * (len(collections) + 5) + "|")
    for way in WAYS:
        there = [each for each in collections if (each, way) in found]
        if not there:
            continue
        of_test = {each: _mean(found, each, way, "test") for each in there}
        single = [value for each, value in of_test.items() if each != MIXTURE]
        mean = [f"{np.mean(single):.4f}" if len(there) == len(collections) else ""]
        cells = [f"{of_test[each]:.4f}" if each in of_test else "" for each in collections] + mean
        dev = f"{np.mean([_mean(found, each, way, 'dev') for each in there]):.4f}"
        times = [
            np.mean([_mean(found, each, way, field) for each in there]) for field in ("seconds", "preparing_seconds")
        ]
        print(f"| {way} | {dev} | " + " | ".join(cells) + f" | {times[0]:.0f} | {times[1]:.0f} |")
    single = [each for each in collections if each != MIXTURE]
    best = [chosen(found, side, single) for side in ("theirs", "ours")]
    shared = [each for each in collections if all((each, way) in found for way in best)]  # not always the mixture
    by_all, by_each = dict.fromkeys(shared, single), {each: [each] for each in shared}
    for what, decide in (("the six collections", by_all), ("each collection", by_each)):
        ways = [{each: chosen(found, side, on) for each, on in decide.items()} for side in ("theirs", "ours")]
        print(f"\nChosen on dev queries of {what}. Theirs: {_listed(ways[0])}. Ours: {_listed(ways[1])}.\n")
        compared = differences(found, *ways)
        _print_differences(compared, "theirs", "ours")
        first = first or compared
    return first


def show_two(rows: Sequence[Mapping[str, Any]], student: str, view: str, seeds: range, ways: Sequence[str]) -> None:
    """Prints the second way less the first: on the collections that ways were chosen on, then on the others."""
    found = finals(rows, student, view, seeds)
    for collections in ((*COLLECTIONS, MIXTURE), UNSEEN):
        there = [each for each in collections if all((each, way) in found for way in ways)]
        if there:
            print(f"\n## {student}, {view}: {ways[1]}, less {ways[0]}\n")
            _print_differences(differences(found, *(dict.fromkeys(there, way) for way in ways)), *ways)


def _print_differences(compared: Sequence[Difference], first: str, second: str) -> None:
    print(f"| collection | {first} | {second} | difference | 95 % | p (Holm) |\n|---|---|---|---|---|---|")
    for row in compared:
        shown = f"{row.ours - row.theirs:+.4f} | {row.low:+.4f} to {row.high:+.4f} | {row.p_value:.4f}"
        print(f"| {row.collection} | {row.theirs:.4f} | {row.ours:.4f} | {shown} |")


def _listed(ways: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(ways.values()))


def draw(of_students: Mapping[str, Sequence[Difference]], target: Path) -> None:
    """Differences with their intervals, a row a collection, a block a student that is named where there are several."""
    several = len(of_students) > 1
    rows = [
        (f"{student}: " * several + _IN_CHART.get(row.collection, row.collection), row)
        for student, found in of_students.items()
        for row in found
    ]
    with chart(target, 0.6 + 0.27 * len(rows), "head to head") as axes:
        axes.axvline(0, color=INK, lw=0.8)
        for place, (_, row) in enumerate(rows):
            axes.plot([row.low, row.high], [place, place], color=BLUE, lw=2)
            axes.plot(row.ours - row.theirs, place, "o", color=INK if row.collection == _MEAN else BLUE, ms=6)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_xlabel("nDCG@10 gain over sentence-transformers; bars: 95 %")


def main() -> None:
    """Prints the tables of the students whose trials are whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path, nargs="?", default=KNOWN, help="trials.jsonl, or what --rows wrote")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[3], help="how many, or from and to; ways that lack one are left out"
    )
    parser.add_argument("--ways", nargs=2, choices=WAYS, help="also compare these two")
    parser.add_argument("--rows", type=Path, help="also write all trials there, as parquet")
    parser.add_argument("--chart", type=Path, help="also draw the differences at equal seconds there, as SVG")
    arguments = parser.parse_args()
    rows, seeds = list(stored_rows(arguments.trials)), range(*arguments.seeds)
    there = [student for student in STUDENTS if is_whole(finals(rows, student, "data", seeds))]
    compared = dict[str, list[Difference]]()
    for student in there:
        for view in VIEWS:
            if any(row["student"] == student and row["purpose"] == view for row in rows):
                compared[student] = show(rows, student, view, seeds)
    for student in there if arguments.ways else ():
        for view in ("data", MORE_EPOCHS):
            show_two(rows, student, view, seeds, arguments.ways)
    print(f"\nTraining took {sum(row.get('seconds', 0) for row in rows) / 3600:.1f} hours of a core.")
    if failed := [row for row in rows if row.get("error")]:
        print("\nDiverged: " + "; ".join(f"{row['student']}, {row['way']}: {row['error']}" for row in failed))
    if arguments.chart:
        draw(compared, arguments.chart)
    if arguments.rows:
        columns = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in columns})
        pq.write_table(table, arguments.rows, compression="zstd")


if __name__ == "__main__":
    main()
