"""Settings of validation: what they stand for, which measure decides when, and which are refused."""

import pytest

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, input_paths, validate
from trainers.engine.early_stopping import Criterion
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


@pytest.mark.parametrize(("values", "named"), [
    ({"measure": "ndcg_10"}, "'validation.measure'.*is not a measure.*Is nDCG@10 meant"),
    ({"others": ["MRR@10"]}, "'validation.others'.*Is RR@10 meant"),
    ({"candidates": 10}, "name the 'run'"),
    ({"top_k": 50}, "top_k is 50, but a measure needs 100"),
    ({"run": "r", "top_k": 100}, "'top_k' is for a search"),
    ({"exclude_split": "dev"}, "exclude_split is 'dev', the split that decides"),
    ({"every": 0}, "'validation.every'"),
    ({"patience": 0}, "'validation.patience'"),
    ({"evry": 5}, "Did you mean 'every'"),
    ({"kind": "batches", "measure": "margin"}, "of 'margin' is better is unknown.*name one of loss, accuracy"),
    ({"kind": "batches", "then": {"measure": "positive_rank"}}, "after_epoch"),
    ({"kind": "loss"}, "'validation.kind' can't be 'loss'"),
])  # fmt: skip
def test_refused(values, named):
    with pytest.raises(UserError, match=named):
        settings(**values)


@pytest.mark.parametrize(("values", "complete"), [
    ({}, True),
    ({"token_budget": 99, "others": ["R@500"]}, True),
    ({"queries": 9}, False),
    ({"run": "r"}, False),
    ({"query_max_length": 9}, False),
    ({"document_max_length": 9}, False),
], ids=str)  # fmt: skip
def test_when_the_numbers_may_be_told_as_the_models_own(values, complete):
    assert settings(**values).is_complete is complete


def test_criteria_of_batches():
    def criteria(**values):
        return settings("batches", **values).criteria(EPOCH_ENDS)

    loss = Criterion("loss", higher_is_better=False)
    assert criteria() == (loss,)
    assert criteria(measure="accuracy") == (Criterion("accuracy", higher_is_better=True),)
    later = {"measure": "positive_rank", "after_epoch": 2}  # which begins past its end
    assert criteria(then=later) == (loss, Criterion("positive_rank", higher_is_better=False, start=21))
    assert settings("batches", then=later).measures == ("loss", "positive_rank")
    with pytest.raises(UserError, match=r"after_epoch.* but the run has"):
        criteria(then=later | {"after_epoch": 3})  # so that it never decides
