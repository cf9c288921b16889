"""The tables and the chart of the trials: ``python -m benchmarks.head_to_head.page /tmp/head-to-head/trials.jsonl``.

Which way stands for a side is decided on dev queries: the one with the best mean over the collections. Differences are
ours less theirs on test queries. A query's difference is the mean over seeds. Intervals draw queries and seeds anew.
p-values are those of a paired t-test over queries, and of a z-test over strata for the mean over collections, after
Holm's correction over all rows of a table. ``--rows`` also writes the trials as parquet.
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

from benchmarks.chart import chart
from benchmarks.head_to_head.data import COLLECTIONS, MIXTURE
from benchmarks.head_to_head.plan import REFERENCE, STUDENTS, stored_rows
from benchmarks.head_to_head.ways import WAYS
from raytriever.reports.plots import BLUE, INK
from retrieval.evaluation.significance import holm, paired_t_test, stratified_z_test

VIEWS = ("data", "seconds")
_MEAN = "mean"
_RESAMPLES = 4_000

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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a file of the benchmark, or of one that ``--rows`` wrote."""
    return pq.read_table(path).to_pylist() if path.suffix == ".parquet" else list(stored_rows(path))


def finals(rows: Sequence[Mapping[str, Any]], student: str, view: str) -> Finals:
    """Of equal seconds: a way whose time is that of the reference anyway has its rows of equal data."""
    found: Finals = defaultdict(dict)
    for purpose in ("data", view):
        for row in rows:
            if row["student"] == student and row["purpose"] == purpose:
                found[row["collection"], row["way"]][row["seed"]] = row
    return found


def chosen(found: Finals, side: str, collections: Sequence[str]) -> str:
    """The side's way with the best mean on dev queries, over the ways that have been tried on all collections."""

    def dev(way: str) -> float:
        return float(np.mean([_mean(found, collection, way, "dev") for collection in collections]))

    ways = [way for way in WAYS if WAYS[way].side == side and all((each, way) in found for each in collections)]
    return max(ways, key=dev)


def differences(found: Finals, theirs: str, ours: str, collections: Sequence[str]) -> list[Difference]:
    """A row a collection, and the mean."""
    random = np.random.default_rng(0)
    both = {
        collection: _of_queries(found[collection, ours]) - _of_queries(found[collection, theirs])
        for collection in collections
    }
    drawn = {collection: _drawn(values, random) for collection, values in both.items()}
    drawn[_MEAN] = np.mean([drawn[collection] for collection in collections], axis=0)
    of_queries = [values.mean(axis=0) for values in both.values()]
    p_values = [paired_t_test(values).p_value for values in of_queries]
    p_values.append(stratified_z_test(of_queries, [1 / len(collections)] * len(collections)).p_value)
    corrected = holm(np.array(p_values))
    rows = []
    for collection, p_value in zip((*collections, _MEAN), corrected.tolist(), strict=True):
        named = collections if collection == _MEAN else [collection]
        of_theirs, of_ours = (np.mean([_mean(found, each, way, "test") for each in named]) for way in (theirs, ours))
        low, high = np.quantile(drawn[collection], [0.025, 0.975])
        rows.append(Difference(collection, float(of_theirs), float(of_ours), float(low), float(high), p_value))
    return rows


def _of_queries(of_seeds: Mapping[int, Mapping[str, Any]]) -> NDArray[np.float64]:
    """(seeds, queries), seeds in order."""
    return np.array([of_seeds[seed]["of_queries"] for seed in sorted(of_seeds)], dtype=np.float64)


def _drawn(values: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Means over seeds and queries that are both drawn anew."""
    seeds, queries = values.shape
    of_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), _RESAMPLES) / seeds
    of_queries = random.multinomial(queries, np.full(queries, 1 / queries), _RESAMPLES) / queries
    return np.asarray(((of_seeds @ values) * of_queries).sum(axis=1), dtype=np.float64)


def _mean(found: Finals, collection: str, way: str, field: str) -> float:
    return float(np.mean([row[field] for row in found[collection, way].values() if field in row] or [np.nan]))


def show(rows: Sequence[Mapping[str, Any]], student: str, view: str) -> list[Difference]:
    """Prints all ways by collection, and the two that stand for their sides."""
    found = finals(rows, student, view)
    collections = [each for each in (*COLLECTIONS, MIXTURE) if (each, REFERENCE) in found]
    print(f"\n## {student}, equal {view}\n")
    print("| way | dev | " + " | ".join([*collections, _MEAN]) + " | seconds | preparing |")
    print("|---" * (len(collections) + 5) + "|")
    for way in WAYS:
        there = [each for each in collections if (each, way) in found]
        if not there:
            continue
        of_test = {each: _mean(found, each, way, "test") for each in there}
        mean = [f"{np.mean([*of_test.values()]):.4f}" if len(there) == len(collections) else ""]
        cells = [f"{of_test[each]:.4f}" if each in of_test else "" for each in collections] + mean
        dev = f"{np.mean([_mean(found, each, way, 'dev') for each in there]):.4f}"
        times = [
            np.mean([_mean(found, each, way, field) for each in there]) for field in ("seconds", "preparing_seconds")
        ]
        print(f"| {way} | {dev} | " + " | ".join(cells) + f" | {times[0]:.0f} | {times[1]:.0f} |")
    theirs, ours = (chosen(found, side, collections) for side in ("theirs", "ours"))
    compared = differences(found, theirs, ours, collections)
    print(f"\nTheirs: {theirs}. Ours: {ours}. Both were chosen on dev queries.\n")
    print("| collection | theirs | ours | difference | 95 % | p (Holm) |\n|---|---|---|---|---|---|")
    for row in compared:
        shown = f"{row.ours - row.theirs:+.4f} | {row.low:+.4f} to {row.high:+.4f} | {row.p_value:.4f}"
        print(f"| {row.collection} | {row.theirs:.4f} | {row.ours:.4f} | {shown} |")
    return compared


def draw(of_students: Mapping[str, Sequence[Difference]], target: Path) -> None:
    """Differences with their intervals, a row a collection, a block a student."""
    rows = [(f"{student}: {row.collection}", row) for student, found in of_students.items() for row in found]
    with chart(target, 0.6 + 0.27 * len(rows), "head to head") as axes:
        axes.axvline(0, color=INK, lw=0.8)
        for place, (_, row) in enumerate(rows):
            axes.plot([row.low, row.high], [place, place], color=BLUE, lw=2)
            axes.plot(row.ours - row.theirs, place, "o", color=INK if row.collection == _MEAN else BLUE, ms=6)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_xlabel("nDCG@10, ours less the best of sentence-transformers; bars: 95 %")


def main() -> None:
    """Prints the tables of all students."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path, help="trials.jsonl, or the parquet file that --rows wrote")
    parser.add_argument("--rows", type=Path, help="also write all trials there, as parquet")
    parser.add_argument("--chart", type=Path, help="also draw the differences at equal seconds there, as SVG")
    arguments = parser.parse_args()
    rows = read_rows(arguments.trials)
    there = [student for student in STUDENTS if any(row["student"] == student and "test" in row for row in rows)]
    compared = {student: [show(rows, student, view) for view in VIEWS][-1] for student in there}
    if failed := [row for row in rows if row.get("error")]:
        print("\nDiverged: " + "; ".join(f"{row['student']}, {row['way']}: {row['error']}" for row in failed))
    if arguments.chart:
        draw(compared, arguments.chart)
    if arguments.rows:
        pq.write_table(pa.Table.from_pylist(rows), arguments.rows, compression="zstd")


if __name__ == "__main__":
    main()
