"""Measures against their definitions and pytrec_eval; queries, grades and runs that leave little to measure."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import ir_measures
import numpy as np
import pytest

from raytriever.errors import UserError
from retrieval.evaluation import measures
from retrieval.evaluation.conventions import CONVENTIONS, Conventions, Ties, resolve
from retrieval.evaluation.measures import Measure, PerQuery, evaluate, parse_measure

Grades = dict[str, int]
NAMES = ["nDCG@10", "nDCG", "RR@10", "RR", "AP", "AP@5", "R@20", "P@3", "Success@5", "Rprec", "Judged@10"]
LEVELS = ["nDCG(rel=2)@10", "RR(rel=2)@10", "AP(rel=2)", "R(rel=2)@20", "P(rel=2)@3", "Success(rel=3)@5"]
LEVELS += ["Rprec(rel=2)"]


def ndcg(ranked: list[str], grades: Grades, cutoff: int) -> float:
    def dcg(gains: list[int]) -> float:
        return sum(max(gain, 0) / math.log2(rank + 1) for rank, gain in enumerate(gains[:cutoff], 1))

    ideal = dcg(sorted(grades.values(), reverse=True))
    return dcg([grades.get(name, 0) for name in ranked]) / ideal if ideal else 0.0


def strict(grades: Grades) -> Grades:
    return {name: grade if grade >= 2 else 0 for name, grade in grades.items()}


def average_precision(ranked: list[str], grades: Grades, cutoff: int, level: int = 1) -> float:
    relevant = {name for name, grade in grades.items() if grade >= level}
    hits = [rank for rank, name in enumerate(ranked[:cutoff], 1) if name in relevant]
    return sum(found / rank for found, rank in enumerate(hits, 1)) / len(relevant) if relevant else 0.0


def reciprocal_rank(ranked: list[str], grades: Grades, cutoff: int, level: int = 1) -> float:
    return next((1 / rank for rank, name in enumerate(ranked[:cutoff], 1) if grades.get(name, 0) >= level), 0.0)


def found(ranked: list[str], grades: Grades, cutoff: int, level: int = 1) -> int:
    return sum(grades.get(name, 0) >= level for name in ranked[:cutoff])


def recall(ranked: list[str], grades: Grades, cutoff: int, level: int = 1) -> float:
    relevant = sum(grade >= level for grade in grades.values())
    return found(ranked, grades, cutoff, level) / relevant if relevant else 0.0


def r_precision(ranked: list[str], grades: Grades, level: int = 1) -> float:
    return recall(ranked, grades, sum(grade >= level for grade in grades.values()), level)


END = 10**9
ORACLES: dict[str, Callable[[list[str], Grades], float]] = {
    "nDCG@10": lambda ranked, grades: ndcg(ranked, grades, 10),
    "nDCG": lambda ranked, grades: ndcg(ranked, grades, END),
    "nDCG(rel=2)@10": lambda ranked, grades: ndcg(ranked, strict(grades), 10),
    "RR@10": lambda ranked, grades: reciprocal_rank(ranked, grades, 10),
    "RR": lambda ranked, grades: reciprocal_rank(ranked, grades, END),
    "RR(rel=2)@10": lambda ranked, grades: reciprocal_rank(ranked, grades, 10, 2),
    "AP": lambda ranked, grades: average_precision(ranked, grades, END),
    "AP@5": lambda ranked, grades: average_precision(ranked, grades, 5),
    "AP(rel=2)": lambda ranked, grades: average_precision(ranked, grades, END, 2),
    "R@20": lambda ranked, grades: recall(ranked, grades, 20),
    "R(rel=2)@20": lambda ranked, grades: recall(ranked, grades, 20, 2),
    "P@3": lambda ranked, grades: found(ranked, grades, 3) / 3,
    "P(rel=2)@3": lambda ranked, grades: found(ranked, grades, 3, 2) / 3,
    "Success@5": lambda ranked, grades: float(found(ranked, grades, 5) > 0),
    "Success(rel=3)@5": lambda ranked, grades: float(found(ranked, grades, 5, 3) > 0),
    "Rprec": lambda ranked, grades: r_precision(ranked, grades),
    "Rprec(rel=2)": lambda ranked, grades: r_precision(ranked, grades, 2),
    "Judged@10": lambda ranked, grades: sum(name in grades for name in ranked[:10]) / len(ranked[:10]),
}


def collection(seed: int, queries: int, distinct_scores: int) -> tuple[dict[str, Grades], dict[str, dict[str, float]]]:
    """Random judgments (grades -3 to 3) and a random run over 60 documents, tied where scores are few."""
    generator = np.random.default_rng(seed)
    qrels, run = {}, {}
    for query in range(queries):
        names = [f"d{number}" for number in generator.permutation(60)]
        qrels[f"q{query}"] = dict(zip(names, generator.integers(-3, 4, 25).tolist(), strict=False))
        retrieved = generator.permutation(names)[: generator.integers(1, 50)].tolist()
        scores = generator.integers(0, distinct_scores, len(retrieved)) / 7
        run[f"q{query}"] = dict(zip(retrieved, scores.astype(np.float32).tolist(), strict=True))
    return qrels, run


@pytest.mark.parametrize("distinct_scores", [10**6, 4])
def test_every_measure_is_its_definition_and_ties_are_by_id_descending(distinct_scores, monkeypatch):
    monkeypatch.setattr(measures, "_QUERIES_AT_ONCE", 17)
    qrels, run = collection(0, 40, distinct_scores)
    result = evaluate(qrels, run, NAMES + LEVELS)
    assert result.query_ids == tuple(sorted(qrels))
    assert list(result.values) == NAMES + LEVELS
    for index, query in enumerate(result.query_ids):
        ranked = [name for name, _ in sorted(run[query].items(), key=lambda item: (item[1], item[0]), reverse=True)]
        for name in NAMES + LEVELS:
            assert result.values[name][index] == pytest.approx(ORACLES[name](ranked, qrels[query]), abs=1e-9), name


def test_queries_are_counted_not_dropped_in_silence() -> None:
    positive = {"b": {"d1": 1, "d2": 0}, "a": {"d1": 2}, "lacking": {"d3": 1}, "unanswered": {"d3": 1}}
    qrels = positive | {"none": {"d1": 0, "d2": -1}, "empty": {}}
    run: dict[str, dict[str, float]] = {"a": {"d1": 1.0}, "b": {"d2": 2.0, "d1": 1.0}, "none": {"d1": 1.0}}
    run |= {"unanswered": {}, "other": {"d1": 1.0}}
    names = ["RR@10", "RR", "nDCG@10", "Judged@10"]
    result = evaluate(qrels, run, names)  # as trec_eval -c
    assert result.query_ids == ("a", "b", "lacking", "none", "unanswered")
    assert result.values["RR@10"].tolist() == result.values["RR"].tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert result.values["Judged@10"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert result.values["RR"].dtype == np.float64
    assert (result.missing_queries, result.queries_without_positive, result.unjudged_queries) == (1, 1, 1)
    assert result.mean("RR@10") == pytest.approx(1.5 / 5)
    assert (result.self_hits, result.depth) == (0, 2)

    result = evaluate(qrels, run, names, resolve("trec", Conventions(missing_queries="leave_out")))
    assert result.query_ids == ("a", "b", "lacking", "none", "unanswered")
    np.testing.assert_array_equal(result.values["RR"], [1.0, 0.5, np.nan, 0.0, 0.0])
    assert result.mean("RR@10") == pytest.approx(1.5 / 4)
    assert result.missing_queries == 1

    result = evaluate(qrels, run, names, resolve("trec", Conventions(queries_without_positives="leave_out")))
    assert result.query_ids == ("a", "b", "lacking", "unanswered")
    assert result.mean("RR@10") == pytest.approx(1.5 / 4)
    assert result.queries_without_positive == 1


@pytest.mark.parametrize(("ties", "rank"), [
    ("document_id_ascending", 2), ("run_order", 3), ("document_id_descending", 4),
])  # fmt: skip
def test_equal_scores_are_ordered_as_the_conventions_say(ties: Ties, rank: int) -> None:
    run = {"q": {"top": 2.0, "b": 1.0, "a": 1.0, "z": 1.0}}
    result = evaluate({"q": {"a": 1}}, run, ["RR", "RR@10", "nDCG@10"], resolve("trec", Conventions(ties=ties)))
    assert result.values["RR"][0] == result.values["RR@10"][0] == 1 / rank
    assert result.values["nDCG@10"][0] == pytest.approx(1 / math.log2(rank + 1))


def test_own_documents_are_removed_where_the_conventions_say_so() -> None:
    qrels = {"1": {"2": 1}, "2": {"1": 1}, "3": {"3": 1}}
    run = {"1": {"1": 9.0, "2": 5.0}, "2": {"1": 5.0, "2": 5.0}, "3": {"3": 1.0}}
    kept = evaluate(qrels, run, ["RR", "Judged@1"])
    assert kept.values["RR"].tolist() == [0.5, 0.5, 1.0]
    removed = evaluate(qrels, run, ["RR", "Judged@1"], CONVENTIONS["beir"])
    assert removed.values["RR"].tolist() == [1.0, 1.0, 0.0]
    assert removed.values["Judged@1"].tolist() == [1.0, 1.0, 0.0]
    assert kept.self_hits == removed.self_hits == 3
    assert run["1"] == {"1": 9.0, "2": 5.0}  # what was passed in is as it was


def test_a_level_is_the_lowest_grade_that_counts() -> None:
    grades, run = {"q": {"a": 1, "b": 2}}, {"q": {"a": 3.0, "c": 2.0, "b": 1.0}}
    result = evaluate(grades, run, ["RR(rel=1)@10", "RR(rel=2)@10", "R(rel=1)@2", "R(rel=2)@2"])
    assert {name: values[0] for name, values in result.values.items()} == {
        "RR(rel=1)@10": 1.0, "RR(rel=2)@10": pytest.approx(1 / 3), "R(rel=1)@2": 0.5, "R(rel=2)@2": 0.0,
    }  # fmt: skip


def test_measures_join_over_the_queries_of_both() -> None:
    here = PerQuery(("a", "c"), {"RR": np.array([1.0, 0.5])}, missing_queries=3)
    there = PerQuery(("b", "c"), {"Accuracy@5": np.array([0.0, 1.0])})
    joined = here.joined(there)
    assert joined.query_ids == ("a", "b", "c")
    np.testing.assert_array_equal(joined.values["RR"], [1.0, np.nan, 0.5])
    np.testing.assert_array_equal(joined.values["Accuracy@5"], [np.nan, 0.0, 1.0])
    assert (joined.mean("RR"), joined.mean("Accuracy@5"), joined.missing_queries) == (0.75, 0.5, 3)


def test_scores_that_differ_in_float64_alone_tie_as_in_trec_eval() -> None:
    run = {query: {"a": 1.0 + more, "b": 1.0} for query, more in (("tied", 1e-12), ("told apart", 1e-6))}
    qrels = {query: {"a": 1} for query in run}
    values = evaluate(qrels, run, ["RR", "RR(rel=1)", "RR@10", "Judged@1"]).values  # one measure has two names
    assert [found.tolist() for found in values.values()] == [[0.5, 1.0]] * 3 + [[0.0, 1.0]]


@pytest.mark.parametrize("name", [
    "MRR@10", "R", "P", "ndcg@10", "nDCG(rel=0)@10", "Judged(rel=2)", "Rprec@5", "R@0", "R@10 ", "R(rel=0)@5", "",
])  # fmt: skip
def test_unknown_measures_are_refused_with_what_is_allowed(name: str) -> None:
    message = r"is not a measure. Allowed, .*nDCG\[\(rel=n\)\]\[@k\], RR\[\(rel=n\)\]\[@k\].*, Rprec\["
    with pytest.raises(UserError, match=message):
        evaluate({"q": {"a": 1}}, {"q": {"a": 1.0}}, ["nDCG@10", name])


@pytest.mark.parametrize(("name", "meant"), [
    ("MRR@10", "RR@10"), ("ndcg_cut_10", "nDCG@10"), ("recall_100", "R@100"), ("hits@100", "Success@100"),
    ("hit_rate_at_5", "Success@5"), ("map", "AP@k"), ("accuracy_20", "Accuracy@20"), ("Rprec@5", "Rprec"),
])  # fmt: skip
def test_other_tools_names_are_recognised(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf" Is {meant} meant\?$"):
        parse_measure(name)


def test_what_a_measure_is_and_nothing_to_measure() -> None:
    assert parse_measure("Success(rel=2)@5") == Measure("Success(rel=2)@5", "Success", 2, 5)
    kinds = {n: parse_measure(n) for n in ("Success@5", "Accuracy@20", "R@5", "nDCG")}
    assert [m.by_answers for m in kinds.values()] == [False, True, False, False]
    with pytest.raises(UserError, match="Accuracy@20 is measured by answers"):
        evaluate({"q": {"a": 1}}, {"q": {"a": 1.0}}, ["Accuracy@20"])
    for qrels in ({}, {"q": {}}, {"q": {"d": 0}}):
        with pytest.raises(UserError, match="no judgment above 0"):
            evaluate(qrels, {"q": {"d": 1.0}}, ["RR"])
    with pytest.raises(UserError, match=r"such as 'Q1'\) has none of the 1 judged queries, such as '1'"):
        evaluate({"1": {"d": 1}}, {"Q1": {"d": 1.0}}, ["RR"])
    with pytest.raises(UserError, match="The ranking is empty: it has no query"):
        evaluate({"1": {"d": 1}}, {}, ["RR"])


ODD_NAMES = ["nDCG@10", "nDCG", "RR@10", "RR(rel=2)", "AP", "R@5", "P@1", "Success(rel=2)@5", "Rprec", "Judged@2"]


@pytest.mark.parametrize("worst", [-1, -2, -7])
def test_a_query_with_grades_below_zero_alone_counts_zero(worst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calculate = ir_measures.iter_calc

    def checked(asked: Any, qrels: dict[str, dict[str, int]], run: Any) -> Iterable[Any]:
        # at such grades trec_eval's code writes where it has no memory, which need not be seen at once
        assert min(grade for grades in qrels.values() for grade in grades.values()) >= 0
        return calculate(asked, qrels, run)

    monkeypatch.setattr(ir_measures, "iter_calc", checked)
    qrels = {"bad": {"a": worst, "b": worst}, "good": {"a": worst, "b": 2}}
    run = {query: {"a": 2.0, "b": 1.0, "c": 0.5} for query in qrels}
    result = evaluate(qrels, run, ODD_NAMES)
    assert result.query_ids == ("bad", "good")
    values = {name: tuple(found) for name, found in result.values.items()}
    assert values == {
        "nDCG@10": (0, pytest.approx(0.6309297535714574)), "nDCG": (0, pytest.approx(0.6309297535714574)),
        "RR@10": (0, 0.5), "RR(rel=2)": (0, 0.5), "AP": (0, 0.5), "R@5": (0, 1), "P@1": (0, 0),
        "Success(rel=2)@5": (0, 1), "Rprec": (0, 0), "Judged@2": (1, 1),
    }  # fmt: skip
    assert result.queries_without_positive == 1
    assert qrels["bad"] == {"a": worst, "b": worst}  # what was passed in is as it was


def test_a_run_whose_queries_found_nothing_counts_zero() -> None:
    qrels = {"1": {"d": 1}, "2": {"e": 1}}
    result = evaluate(qrels, {"1": {}, "2": {}, "3": {}}, ["RR", "nDCG@10"])
    assert result.values["RR"].tolist() == result.values["nDCG@10"].tolist() == [0.0, 0.0]
    assert (result.missing_queries, result.unjudged_queries, result.depth) == (0, 1, 0)
    left_out = resolve("trec", Conventions(missing_queries="leave_out"))
    assert evaluate(qrels, {"1": {}}, ["RR"], left_out).mean("RR") == 0.0
    with pytest.raises(UserError, match=r"The ranking \(1 query, such as '3'\) has none of the 2 judged queries"):
        evaluate(qrels, {"3": {}}, ["RR"])
