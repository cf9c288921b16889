"""Judgments and runs that leave little to measure: grades below zero, and runs that found nothing."""

from collections.abc import Iterable
from typing import Any

import ir_measures
import pytest

from raytriever.errors import UserError
from retrieval.evaluation.conventions import Conventions, resolve
from retrieval.evaluation.measures import evaluate

NAMES = ["nDCG@10", "nDCG", "RR@10", "RR(rel=2)", "AP", "R@5", "P@1", "Success(rel=2)@5", "Rprec", "Judged@2"]


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
    result = evaluate(qrels, run, NAMES)
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
