import pytest

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, input_paths, validate
from trainers.engine.early_stopping import Criterion, Evaluation, best_evaluation
from trainers.validation.settings import ValidationSettings

EPOCH_ENDS = [10, 20, 30]


class Recipe(Settings):
    validation: ValidationSettings


def settings(kind: str = "retrieval", **values):
    inputs = {"collection": "c"} if kind == "retrieval" else {"batches": "b"}
    return validate(Recipe, {"validation": {"kind": kind} | inputs | values}, "recipe").validation


def test_defaults_of_retrieval():
    found = settings()
    assert found.measures == ("nDCG@10", "RR@10", "R@100")
    assert (found.split, found.depth) == ("dev", 100)
    assert found.criteria(EPOCH_ENDS) == (Criterion("nDCG@10", higher_is_better=True),)
    assert settings(others=["R@500", "nDCG@10"]).depth == 500
    assert input_paths(Recipe(validation=settings(run="r"))) == {"validation.collection": "c", "validation.run": "r"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"measure": "ndcg_10"}, "'validation.measure'.*is not a measure.*Is nDCG@10 meant"),
        ({"others": ["MRR@10"]}, "'validation.others'.*Is RR@10 meant"),
        ({"candidates": 10}, "name the 'run'"),
        ({"top_k": 50}, "top_k is 50, but a measure looks at 100"),
        ({"run": "r", "top_k": 100}, "'top_k' is for a search"),
        ({"every": 0}, "'validation.every'"),
        ({"patience": 0}, "'validation.patience'"),
        ({"evry": 5}, "Did you mean 'every'"),
        ({"kind": "batches", "measure": "margin"}, "of 'margin' is better isn't known.*name one of loss, accuracy"),
        ({"kind": "batches", "then": {"measure": "positive_rank"}}, "after_epoch"),
        ({"kind": "loss"}, "'validation.kind' can't be 'loss'"),
    ],
)
def test_refused(values, named):
    with pytest.raises(UserError, match=named):
        settings(**values)


@pytest.mark.parametrize(
    ("values", "complete"),
    [
        ({}, True),
        ({"token_budget": 99, "others": ["R@500"]}, True),
        ({"queries": 9}, False),
        ({"run": "r"}, False),
        ({"query_max_length": 9}, False),
        ({"document_max_length": 9}, False),
    ],
    ids=str,
)
def test_when_the_numbers_may_be_told_as_the_models_own(values, complete):
    assert settings(**values).is_complete is complete


def test_criteria_of_batches():
    assert settings("batches").criteria(EPOCH_ENDS) == (Criterion("loss", higher_is_better=False),)
    found = settings("batches", measure="accuracy", minimum_change=0.1)
    assert found.criteria(EPOCH_ENDS) == (Criterion("accuracy", higher_is_better=True, minimum_change=0.1),)


def test_a_later_measure_begins_past_the_end():
    found = settings("batches", then={"measure": "positive_rank", "after_epoch": 2})
    first, second = found.criteria(EPOCH_ENDS)
    assert (first.measure, second.measure, second.start) == ("loss", "positive_rank", 21)
    assert not second.higher_is_better
    assert found.measures == ("loss", "positive_rank")


def test_a_later_measure_that_never_decides_is_refused():
    found = settings("batches", then={"measure": "positive_rank", "after_epoch": 3})
    with pytest.raises(UserError, match=r"after_epoch.* but the run has"):
        found.criteria(EPOCH_ENDS)


def test_under_the_later_measure_the_best_starts_anew():
    """An average rank is never below the best loss, so without a new start the last epochs would never be kept."""
    criteria = settings("batches", then={"measure": "positive_rank", "after_epoch": 1}).criteria(EPOCH_ENDS)
    history = [
        Evaluation(step, {"loss": loss, "positive_rank": rank})
        for step, loss, rank in [(5, 0.2, 9.0), (10, 0.1, 8.0), (15, 0.3, 7.0), (20, 0.4, 6.0), (25, 0.5, 6.5)]
    ]
    best = [best_evaluation(history[:count], criteria).step for count in range(1, 6)]
    assert best == [5, 10, 15, 20, 20]
