"""Is a retriever better for being trained on our batches than by the best of sentence-transformers?

    python -m benchmarks.head_to_head --data ../shared/data --base MODEL --output /tmp/head-to-head --minutes 60

Trains students in each way (``ways.py``) on six collections and on their mixture, and appends a line a trial to
``trials.jsonl``. A trial that is there isn't run again, so that the same command goes on. Learning rate and temperature
of each way are chosen on the mixture's dev queries: the rates at the first temperature, then the other temperatures at
the best rate. The final trials with these are measured on test queries, from ``--seeds`` seeds. Where a way's trials
take another time than pairs in random batches of 64, further trials have as many steps as fit into that time.
``python -m benchmarks.head_to_head.page`` makes the tables.
"""

import argparse
import json
import logging
import platform
import time
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers

from benchmarks.head_to_head.data import COLLECTIONS, MIXTURE, Base, Collection, base_of, read_collection
from benchmarks.head_to_head.plan import MAX_LENGTH, REFERENCE, STUDENTS, TEMPERATURES, Trial, stored_rows
from benchmarks.head_to_head.trial import Point, run_trial, tokens_of_row
from benchmarks.head_to_head.ways import WAYS, Material, prepare
from raytriever.errors import UserError

_ALIKE = 0.1  # times that differ by less are equal


class Bench:
    """Runs trials that are not in the file yet."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._file = arguments.output / "trials.jsonl"
        self._rows: dict[Trial, dict[str, Any]] = {}
        self._ends = time.monotonic() + 60 * arguments.minutes
        arguments.output.mkdir(parents=True, exist_ok=True)
        for row in stored_rows(self._file):
            self._rows[Trial(**{name: row[name] for name in Trial.__dataclass_fields__})] = row

    def row(self, trial: Trial) -> dict[str, Any]:
        """What came of the trial. Raises ``TimeoutError`` where it would begin after the time that was given."""
        if trial not in self._rows:
            if time.monotonic() > self._ends:
                raise TimeoutError
            self._rows[trial] = asdict(trial) | self._run(trial)
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
        collection, base = self._collection(trial.student, trial.collection)
        material = self._material(trial.student, trial.collection, trial.way, trial.seed)
        torch.manual_seed(trial.seed)
        model = student.build(self._arguments.base, MAX_LENGTH, collection)
        tokens = tokens_of_row(model, material)
        point = Point(trial.learning_rate, trial.temperature)
        about = {"batch": way.batch, "masked": material.masked, "preparing_seconds": material.seconds} | VERSIONS
        try:
            outcome = run_trial(
                model, material, collection, way.batch, student.epochs, trial.steps, point, trial.seed,
                self._arguments.output / "trainer",
            )  # fmt: skip
        except FloatingPointError as error:
            return about | {"error": str(error)}
        seconds = outcome.seconds
        if way.guided:  # each step would embed its texts by the guide
            seconds += base.seconds / len(base.of_text) * 2 * way.batch * outcome.steps
        found = about | {"dev": round(float(outcome.dev.mean()), 5), "seconds": seconds, "steps_made": outcome.steps}
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
    def _material(self, student: str, name: str, way: str, seed: int) -> Material:
        return prepare(WAYS[way], *self._collection(student, name), STUDENTS[student].epochs, seed)


def tuned(bench: Bench, student: str, way: str) -> Point:
    """What is best on the mixture's dev queries. A trial that diverged is worst."""

    def dev(point: Point) -> float:
        return float(bench.row(Trial(student, MIXTURE, way, "tuning", 0, *point)).get("dev", -1.0))

    first, *others = TEMPERATURES
    best = max((Point(rate, first) for rate in STUDENTS[student].rates), key=dev)
    return max([best, *(best._replace(temperature=each) for each in others)], key=dev)


def run_all(bench: Bench, student: str, seeds: int) -> None:
    """Tunes, and runs the final trials, seed after seed."""
    points = {way: tuned(bench, student, way) for way in STUDENTS[student].ways}
    where = [
        (collection, way)
        for collection in (*COLLECTIONS, MIXTURE)
        for way in points
        if collection == MIXTURE or not WAYS[way].domains_apart
    ]
    for seed in range(seeds):
        for collection, way in where:
            bench.row(Trial(student, collection, way, "data", seed, *points[way]))
        for collection, way in where:
            of_way, of_reference = (
                bench.row(Trial(student, collection, each, "data", 0, *points[each])) for each in (way, REFERENCE)
            )
            if "error" in of_way or "error" in of_reference:
                continue
            share = of_reference["seconds"] / of_way["seconds"]
            if abs(share - 1) > _ALIKE:
                steps = max(1, round(of_way["steps_made"] * share))
                bench.row(Trial(student, collection, way, "seconds", seed, *points[way], steps))


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
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("raytriever").setLevel(logging.ERROR)
    if absent := [name for name in COLLECTIONS if not (arguments.data / name).is_dir()]:
        raise UserError(f"{arguments.data} has no {', '.join(absent)}. Name a folder that has these collections.")
    bench = Bench(arguments)
    try:
        for student in arguments.students:
            run_all(bench, student, arguments.seeds)
    except TimeoutError:
        print("The time is over. The same command goes on.")


if __name__ == "__main__":
    main()
