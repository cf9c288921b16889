"""Is a retriever better for being trained on our batches than by the best of sentence-transformers?

    python -m benchmarks.head_to_head --data ../shared/data --base MODEL --output /tmp/head-to-head --minutes 60

Trains students in each way (``ways.py``) on six collections and on their mixture, and appends a line a trial to
``trials.jsonl``. A trial that is there isn't run again, so that the same command goes on. Learning rate and temperature
of each way are chosen on dev queries (``Student.tuned_on``), or are the reference's (``untuned``). The final trials
with these are measured on test queries, by ``--seeds`` seeds. Where a way's training takes another time than pairs in
random batches of 64, further trials have as many steps as fit into that time. What vectors of the base encoder take is
stored beside it, for both sides.
``python -m benchmarks.head_to_head.page`` makes the tables.
"""

import argparse
import json
import logging
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers

from benchmarks.head_to_head.data import COLLECTIONS, MIXTURE, UNSEEN, Base, Collection, base_of, read_collection
from benchmarks.head_to_head.plan import (
    KNOWN,
    MAX_LENGTH,
    MORE_EPOCHS,
    REFERENCE,
    STUDENTS,
    TEMPERATURES,
    Trial,
    stored_rows,
)
from benchmarks.head_to_head.trial import Point, rows_and_tokens, run_trial
from benchmarks.head_to_head.ways import WAYS, Material, prepare

_ALIKE = 0.25  # times that differ by less are equal: so much they differ on a busy machine


class Bench:
    """Runs trials that are not in the file yet."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._file = arguments.output / "trials.jsonl"
        self._rows: dict[Trial, dict[str, Any]] = {}
        self._ends = time.monotonic() + 60 * arguments.minutes
        arguments.output.mkdir(parents=True, exist_ok=True)
        for row in [*stored_rows(arguments.known), *stored_rows(self._file)]:
            trial = Trial(**{name: row[name] for name in Trial.__dataclass_fields__ if name in row})
            if row["design"] == trial.design:
                self._rows[trial] = row

    def row(self, trial: Trial) -> dict[str, Any]:
        """What came of the trial. Raises ``TimeoutError`` where it would begin after the time that was given."""
        if trial not in self._rows:
            if time.monotonic() > self._ends:
                raise TimeoutError
            self._rows[trial] = asdict(trial) | {"design": trial.design} | self._run(trial)
            with self._file.open("a") as file:
                file.write(json.dumps(self._rows[trial]) + "\n")
            shown = self._rows[trial]
            print(
                f"{trial.student:10} {trial.collection:20} {trial.way:32} {trial.purpose:8} {trial.seed}"
                f" {trial.learning_rate:.0e} {trial.temperature} {shown.get('dev', shown.get('error'))}", flush=True,
            )  # fmt: skip
        return self._rows[trial]

    def _run(self, trial: Trial) -> dict[str, Any]:
        student, way = STUDENTS[trial.student], WAYS[trial.way]
        collection, _ = self._collection(trial.student, trial.collection)
        material = self._material(trial.student, trial.collection, trial.way, trial.epochs, trial.seed)
        torch.manual_seed(trial.seed)
        model = student.build(self._arguments.base, MAX_LENGTH, collection)
        rows, tokens = rows_and_tokens(model, material)
        point = Point(trial.learning_rate, trial.temperature)
        about = {
            "batch": way.batch,
            "rows": rows,
            "masked": material.masked,
            "preparing_seconds": material.seconds,
            "date": time.strftime("%Y-%m-%d"),
        } | VERSIONS
        try:
            outcome = run_trial(
                model, material, collection, way.batch, trial.epochs, trial.steps, point, trial.seed,
                self._arguments.output / "trainer",
            )  # fmt: skip
        except FloatingPointError as error:
            return about | {"error": str(error)}
        found = about | {"dev": round(float(outcome.dev.mean()), 5)}
        found |= {"seconds": outcome.seconds, "steps_made": outcome.steps}
        found |= {"tokens": round(tokens * way.batch * outcome.steps), "loss": outcome.loss}
        if trial.purpose != "tuning":
            found |= {"test": round(float(outcome.test.mean()), 5), "of_queries": np.round(outcome.test, 4).tolist()}
        return found

    @lru_cache(maxsize=1)  # noqa: B019  # lives as long as the process
    def _collection(self, student: str, name: str) -> tuple[Collection, Base]:
        collection = read_collection(self._arguments.data, name, STUDENTS[student].limits)
        folder = self._arguments.output / "base" / student.replace(" ", "_")
        return collection, base_of(collection, self._arguments.base, MAX_LENGTH, folder)

    @lru_cache(maxsize=1)  # noqa: B019
    def _material(self, student: str, name: str, way: str, epochs: int, seed: int) -> Material:
        return prepare(WAYS[way], *self._collection(student, name), epochs, seed)


def best(bench: Bench, student: str, way: str, collections: Sequence[str], points: Iterable[Point]) -> Point:
    """The point with the best mean over dev queries of ``collections``, by one seed. Divergence is worst.

    Of an untuned way it is the reference's.
    """
    way = REFERENCE if way in STUDENTS[student].untuned else way
    there = [each for each in collections if each == MIXTURE or not WAYS[way].without_domains]

    def dev(point: Point) -> float:
        rows = [bench.row(Trial(student, each, way, "tuning", 0, *point)) for each in there]
        return float(np.mean([row.get("dev", -1.0) for row in rows]))

    return max(points, key=dev)


def tuned_alone(bench: Bench, student: str, way: str, collection: str) -> Point:
    """The best of all rates and temperatures on the collection's own dev queries; vectors have no temperature."""
    temperatures = TEMPERATURES[: 1 if WAYS[way].distils == "vectors" else None]
    points = [Point(rate, temperature) for rate in STUDENTS[student].rates for temperature in temperatures]
    return best(bench, student, way, (collection,), points)


def tuned(bench: Bench, student: str, way: str) -> Point:
    """The best one on the collections that the student is tuned on.

    The rates at the first temperature; where the best is the first or the last, one more beyond; then the other
    temperatures at the best rate.
    """
    rates, (first, *others) = STUDENTS[student].rates, TEMPERATURES
    where = STUDENTS[student].tuned_on
    found = best(bench, student, way, where, [Point(rate, first) for rate in rates])
    beyond = {rates[0]: rates[0] / 3, rates[-1]: rates[-1] * 3}.get(found.learning_rate)
    if beyond is not None:
        found = best(bench, student, way, where, [found, Point(beyond, first)])
    return best(bench, student, way, where, [found, *(found._replace(temperature=each) for each in others)])


def run_unseen(bench: Bench, student: str, ways: Sequence[str], seeds: int) -> None:
    """Final trials of equal data on ``UNSEEN``. These are few pairs, so there are trials with more epochs too."""
    tried = [way for way in STUDENTS[student].ways if way in ways and not WAYS[way].without_domains]
    for collection, way in product(UNSEEN, tried):
        point = tuned_alone(bench, student, way, collection)
        for purpose, seed in product(("data", MORE_EPOCHS), range(seeds)):
            bench.row(Trial(student, collection, way, purpose, seed, *point))


def run_all(bench: Bench, student: str, ways: Sequence[str], seeds: int) -> None:
    """Tunes, and runs the final trials, seed after seed: of equal data, then of equal seconds."""
    tried = [way for way in STUDENTS[student].ways if way in ways]
    where = [
        (collection, way)
        for collection in (*COLLECTIONS, MIXTURE)
        for way in tried
        if collection == MIXTURE or not WAYS[way].without_domains
    ]
    if STUDENTS[student].tuned_on:
        of_ways = {way: tuned(bench, student, way) for way in tried}
        points = {(collection, way): of_ways[way] for collection, way in where}
    else:
        points = {(collection, way): tuned_alone(bench, student, way, collection) for collection, way in where}

    def of_data(collection: str, way: str, seed: int) -> dict[str, Any]:
        return bench.row(Trial(student, collection, way, "data", seed, *points[collection, way]))

    def seconds(collection: str, way: str) -> float:
        return float(np.median([of_data(collection, way, seed).get("seconds", np.nan) for seed in range(seeds)]))

    for seed in range(seeds):
        for collection, way in where:
            of_data(collection, way, seed)
    for seed in range(seeds):
        for collection, way in where:
            share = seconds(collection, REFERENCE) / seconds(collection, way)
            if abs(share - 1) > _ALIKE:
                steps = max(1, round(of_data(collection, way, seed)["steps_made"] * share))
                bench.row(Trial(student, collection, way, "seconds", seed, *points[collection, way], steps))


VERSIONS = {
    "sentence_transformers": sentence_transformers.__version__,
    "transformers": transformers.__version__,
    "torch": torch.__version__,
    "processor": platform.processor() or platform.machine(),
}


def main() -> None:
    """Runs what is missing, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the collections")
    parser.add_argument("--base", required=True, help="the base encoder's folder: a BERT with WordPiece tokens")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--known", type=Path, default=KNOWN, help="rows that are not made again")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="beside pairs in random batches")
    parser.add_argument("--unseen", action="store_true", help="trials on three further collections instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("raytriever").setLevel(logging.ERROR)
    needed = UNSEEN if arguments.unseen else COLLECTIONS
    if absent := [name for name in needed if not (arguments.data / name).is_dir()]:
        parser.error(f"{arguments.data} has no {', '.join(absent)}. Name a folder that has these collections.")
    bench = Bench(arguments)
    try:
        for student in arguments.students:
            run = run_unseen if arguments.unseen else run_all
            run(bench, student, [REFERENCE, *arguments.ways], arguments.seeds)
    except TimeoutError:
        print("The time is over. The same command goes on.")


if __name__ == "__main__":
    main()
