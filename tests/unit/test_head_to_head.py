"""The comparison with sentence-transformers: what is cut from a collection, what is chosen, and what is significant."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from scipy import stats

from benchmarks.head_to_head.__main__ import tuned, tuned_alone
from benchmarks.head_to_head.data import COLLECTIONS, MIXTURE, Base, Limits, Pair, read_collection
from benchmarks.head_to_head.page import chosen, differences, finals, is_whole, main, show, student, variances
from benchmarks.head_to_head.plan import Trial, stored_rows
from benchmarks.head_to_head.ways import taught

SEEDS, QUERIES = range(3), 40
RANDOM = np.random.default_rng(0)


def write_folder(folder: Path, splits: dict[str, list[tuple[str, str, int]]]) -> None:
    (folder / "qrels").mkdir(parents=True)
    for split, rows in splits.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    records = [{"_id": f"d{number}", "title": f"title {number}", "text": "text"} for number in range(20)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    records = [{"_id": f"q{number}", "text": f"question {number}"} for number in range(20)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_collection_is_cut_evenly_and_keeps_what_is_judged(tmp_path: Path) -> None:
    train = [(f"q{number}", f"d{number}", number % 2) for number in range(10)]
    write_folder(
        tmp_path / "one", {"train": train, "dev": [("q11", "d11", 1), ("q12", "d3", 0)], "test": [("q13", "d13", 2)]}
    )
    found = read_collection(tmp_path, "one", Limits(pairs=3, documents=7))
    assert found.pairs == [Pair("one-q1", "one-d1"), Pair("one-q3", "one-d3"), Pair("one-q7", "one-d7")]
    assert found.splits["dev"].grades == {"one-q11": {"one-d11": 1}}  # q12 has no positive
    assert found.splits["test"].queries == ["one-q13"]
    assert found.queries["one-q11"] == "question 11"
    assert found.documents["one-d13"] == "title 13 text"
    assert len(found.documents) == 7
    assert {"one-d1", "one-d3", "one-d7", "one-d11", "one-d13"} < found.documents.keys()


def test_a_held_out_query_is_not_trained_on(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", {"train": [("q1", "d1", 1)], "dev": [("q1", "d2", 1)], "test": [("q2", "d2", 1)]})
    with pytest.raises(ValueError, match="trains on 1 of the held-out queries, such as one-q1"):
        read_collection(tmp_path, "one", Limits(10, 10))


def row(collection: str, way: str, purpose: str, seed: int, dev: float, test: float) -> dict[str, Any]:
    values = np.clip(RANDOM.normal(test, 0.05, QUERIES), 0, 1).tolist()
    named = {"student": "static", "collection": collection, "way": way, "purpose": purpose, "seed": seed}
    return named | {"dev": dev, "test": float(np.mean(values)), "of_queries": values}


def rows_of(way: str, dev: float, test: float, purpose: str = "data", seeds: range = SEEDS) -> list[dict[str, Any]]:
    return [row("conala", way, purpose, seed, dev, test) for seed in seeds]


def test_dev_queries_choose_and_ways_without_all_seeds_are_left_out() -> None:
    rows = (
        rows_of("pairs", 0.5, 0.5) + rows_of("mined negatives", 0.6, 0.4) + rows_of("guided", 0.9, 0.9, seeds=range(1))
    )
    rows += rows_of("contextual", 0.7, 0.6) + rows_of("in turns", 0.6, 0.8)
    found = finals(rows, "static", "data", SEEDS)
    assert ("conala", "guided") not in found
    assert chosen(found, "theirs", ["conala"]) == "mined negatives"
    assert chosen(found, "ours", ["conala"]) == "contextual"
    assert found["conala", "pairs, a dataset a domain"] == found["conala", "pairs"]  # of one domain


def test_trials_of_equal_seconds_replace_those_of_equal_data() -> None:
    rows = rows_of("pairs", 0.5, 0.5) + rows_of("mined negatives", 0.6, 0.6)
    rows += rows_of("mined negatives", 0.4, 0.4, "seconds")
    found = finals(rows, "static", "seconds", SEEDS)
    assert found["conala", "mined negatives"][0]["dev"] == 0.4
    assert found["conala", "pairs"][0]["dev"] == 0.5
    assert finals(rows, "static", "data", SEEDS)["conala", "mined negatives"][0]["dev"] == 0.6


class Tried:
    """Stands for a bench: dev by collection, rate and temperature; what is not named is 0, and None diverged."""

    def __init__(self, dev: dict[tuple[str, float, float], float | None]) -> None:
        self.dev, self.trials = dev, list[Trial]()

    def row(self, trial: Trial) -> dict[str, Any]:
        self.trials.append(trial)
        dev = self.dev.get((trial.collection, trial.learning_rate, trial.temperature), 0.0)
        return {"error": "no numbers"} if dev is None else {"dev": dev}


def test_a_collection_alone_is_tuned_on_all_rates_and_temperatures() -> None:
    bench = Tried({("conala", 3e-4, 0.05): 0.6, ("conala", 1e-3, 0.02): 0.7, ("squad_dpr", 3e-4, 0.02): 0.9})
    assert tuned_alone(bench, "two layers", "in turns", "conala") == (1e-3, 0.02)
    assert len(set(bench.trials)) == 6
    assert {(trial.way, trial.purpose, trial.seed) for trial in bench.trials} == {("in turns", "tuning", 0)}
    tuned_alone(bench, "MiniLM", "in turns, margin -.1", "conala")
    assert bench.trials[-1].way == "pairs"
    bench.trials.clear()
    tuned_alone(bench, "two layers", "vectors, distilled", "conala")
    assert {trial.temperature for trial in bench.trials} == {0.05}  # they have none


def test_their_losses_are_taught_what_the_base_encoder_says(tmp_path: Path) -> None:
    of_text = {"a": np.array([3.0, 0]), "b": np.array([0, 2.0]), "c": np.array([4.0, 3.0])}
    base = Base(None, of_text, 0.0, tmp_path)  # type: ignore[arg-type]
    rows = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["b", "c"], "negative": ["c", "a"]})
    np.testing.assert_allclose(taught(base, rows, scores=True), [[0, 0.8], [0.6, 0]], atol=1e-7)
    np.testing.assert_allclose(taught(base, rows, scores=False)[1], [[0, 1], [0.8, 0.6], [1, 0]], atol=1e-7)


def test_several_collections_are_tuned_in_the_mean_one_rate_beyond_and_divergence_is_worst() -> None:
    names = ("conala", "nfcorpus_filtered", "mixture")
    dev: dict[tuple[str, float, float], float | None] = {(name, 0.03, 0.05): 0.5 for name in names}
    dev |= {(name, 0.01, 0.05): 0.4 for name in names} | {("conala", 0.03, 0.02): 0.9}
    dev |= {("conala", 0.003, 0.05): 2.0, ("mixture", 0.003, 0.05): None}
    assert tuned(Tried(dev), "static", "pairs") == (0.03, 0.05)
    assert tuned(Tried(dev | {("mixture", 0.03, 0.01): 1.6}), "static", "pairs") == (0.03, 0.01)


def test_one_seed_gives_the_paired_t_test() -> None:
    values = RANDOM.normal(0.01, 0.1, (1, QUERIES))
    low, high, p_value = student(float(values.mean()), variances(values))
    expected = stats.ttest_1samp(values[0], 0)
    assert p_value == pytest.approx(expected.pvalue)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_seeds_that_differ_widen_the_interval() -> None:
    of_queries = RANDOM.normal(0, 0.1, QUERIES)
    alike, apart = (of_queries + np.array([[-spread], [0], [spread]]) for spread in (0.0, 0.05))
    (low, high, _), (lower, higher, _) = (student(float(values.mean()), variances(values)) for values in (alike, apart))
    assert higher - lower > 1.5 * (high - low)


def test_the_mean_is_over_the_single_collections() -> None:
    rows = rows_of("pairs", 0.5, 0.5) + rows_of("contextual", 0.6, 0.52)
    for way, test in (("pairs", 0.3), ("contextual", 0.9)):
        rows += [row("mixture", way, "data", seed, 0.5, test) for seed in SEEDS]
    found = finals(rows, "static", "data", SEEDS)
    names = ["conala", "mixture"]
    *_, mixed, mean = differences(found, dict.fromkeys(names, "pairs"), dict.fromkeys(names, "contextual"))
    assert mean.collection == "mean"
    assert mean.ours - mean.theirs == pytest.approx(0.02, abs=0.02)
    assert mixed.ours - mixed.theirs == pytest.approx(0.6, abs=0.1)
    assert mixed.low > 0.4


def test_a_student_has_tables_when_both_sides_have_been_tried_on_the_six_collections() -> None:
    ways = ("pairs", "contextual")
    rows = [row(each, way, "data", seed, 0.5, 0.5) for way in ways for each in COLLECTIONS for seed in SEEDS]
    assert is_whole(finals(rows, "static", "data", SEEDS))
    mixture = {way: [row(MIXTURE, way, "data", seed, 0.4, 0.5) for seed in SEEDS] for way in ways}
    names = [*COLLECTIONS, MIXTURE, "mean"]
    of_one = show(rows + mixture["pairs"], "static", "data", SEEDS)
    assert [found.collection for found in of_one] == [name for name in names if name != MIXTURE]
    of_both = show(rows + mixture["pairs"] + mixture["contextual"], "static", "data", SEEDS)
    assert [found.collection for found in of_both] == names
    guided = [each | {"way": "guided"} if each["way"] == "pairs" else each for each in rows]  # without the reference
    assert [found.collection for found in show(guided, "static", "data", SEEDS)] == [
        name for name in names if name != MIXTURE
    ]
    assert not is_whole(finals(rows[:-1], "static", "data", SEEDS))
    assert not is_whole(finals(rows[: len(rows) // 2], "static", "data", SEEDS))


def test_stored_rows_give_the_tables_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tuning lack what final ones have, and the other way round."""
    named = {"student": "static", "collection": "conala", "way": "pairs", "seed": 0}
    rows = [named | {"purpose": "tuning", "dev": 0.5}, *rows_of("pairs", 0.5, 0.5), *rows_of("contextual", 0.6, 0.5)]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut": ')
    stored = tmp_path / "trials.parquet"
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path / "trials.jsonl"), "--rows", str(stored)])
    main()
    assert (
        finals(list(stored_rows(stored)), "static", "data", SEEDS).keys()
        == finals(rows, "static", "data", SEEDS).keys()
    )
    assert [row["dev"] for row in stored_rows(stored)] == [row["dev"] for row in rows]
