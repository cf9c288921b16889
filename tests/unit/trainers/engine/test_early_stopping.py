"""Which evaluation of a run is its best, and when it stops."""

import math

import pytest

from trainers.engine.early_stopping import (
    Criterion,
    Evaluation,
    best_evaluation,
    evaluations_without_improvement,
    should_stop,
)

HIGHER = [Criterion("nDCG@10", higher_is_better=True)]
LOSS_THEN_RANK = [
    Criterion("loss", higher_is_better=False),
    Criterion("positive_rank", higher_is_better=False, start=30),
]


def history(*values: float) -> list[Evaluation]:
    return [Evaluation(step, {"nDCG@10": value}) for step, value in enumerate(values)]


def best_step(evaluations, criteria):
    best = best_evaluation(evaluations, criteria)
    return best.step if best else None


@pytest.mark.parametrize(
    ("values", "best", "since"),
    [
        ([0.5], None, 0),  # the start alone
        ([0.9, 0.3], 1, 0),  # the start is never the best
        ([0.1, 0.3, 0.4, 0.2], 2, 1),
        ([0.1, 0.3, 0.3, 0.3], 1, 2),  # the first of equals
        ([0.1, 0.3, math.nan, 0.2], 1, 2),
        ([0.1, math.nan, 0.2, 0.1], 2, 1),
    ],
)
def test_the_best_evaluation(values, best, since):
    evaluations = history(*values)
    assert best_step(evaluations, HIGHER) == best
    assert evaluations_without_improvement(evaluations, HIGHER) == since


def test_patience_counts_evaluations():
    evaluations = history(0.0, 0.5, 0.4, 0.3, 0.2)
    assert [should_stop(evaluations[:n], HIGHER, 2) for n in range(1, 6)] == [False, False, False, True, True]
    assert not should_stop(evaluations, HIGHER, None)


def test_under_a_later_criterion_the_best_so_far_starts_anew():
    evaluations = [
        Evaluation(step, {"loss": loss, "positive_rank": rank})
        for step, loss, rank in [(10, 1.0, 9.0), (20, 0.5, 8.0), (30, 0.7, 7.0), (40, 0.8, 6.5), (50, 0.9, 6.8)]
    ]
    assert [best_step(evaluations[:n], LOSS_THEN_RANK) for n in range(1, 6)] == [10, 20, 30, 40, 40]
    assert evaluations_without_improvement(evaluations, LOSS_THEN_RANK) == 1
