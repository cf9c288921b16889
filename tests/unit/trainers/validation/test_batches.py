"""Validation on stored batches: means over them in evaluation mode, the same however often it is made."""

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyBatches, tiny_objective
from tests.unit.trainers.validation.made_up import MadeUpBatches, draw_from_generators, seed_generators
from trainers.engine.early_stopping import Criterion
from trainers.engine.order import Piece
from trainers.engine.reading import BatchSource, Reader
from trainers.validation.batches import BatchValidation
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import BatchValidationSettings


def validation(batches: BatchSource | None = None, bf16: bool = False, **settings) -> BatchValidation:
    given = BatchValidationSettings(batches="there", **settings)
    return BatchValidation(given, given.criteria([10, 20]), bf16=bf16, batches=batches or MadeUpBatches())


def test_means_over_the_batches(objective):
    found = validation(every=3, patience=2).measure(objective)
    assert list(found) == ["loss", "draw", "positive_rank"]
    batches, losses, ranks = MadeUpBatches(), [], []
    objective.eval()
    for number in range(batches.count):
        with torch.no_grad():
            outcome = objective(objective.collate(batches.read(0, number)))
        losses.append(float(outcome.loss))
        ranks.append(float(outcome.metrics["positive_rank"]))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert found["positive_rank"] == pytest.approx(np.mean(ranks))
    assert 1 < found["positive_rank"] < batches.size


def test_the_first_batches_alone(objective):
    limited = validation(MadeUpBatches(5), batches_limit=2)
    assert limited.measure(objective) == validation(MadeUpBatches(2)).measure(objective)
    assert limited.notes == ("loss on 2 of 5 batches of made/up",)
    assert validation(MadeUpBatches(5), batches_limit=9).notes == ("loss on 5 batches of made/up",)


@pytest.mark.parametrize(("count", "seed"), [(None, 0), (1, 0), (1, 4), (0, 0)])
def test_hard_negatives_are_those_that_the_seed_draws(count: int | None, seed: int) -> None:
    objective, stored = tiny_objective(), TinyBatches((3,))
    pieces = [Reader(stored, objective, seed, count).read_piece(0, Piece((number,))) for number in range(3)]
    losses = [objective(objective.collate(rows)).loss.item() for rows in pieces]
    exact = validation(stored, hard_negatives=count, seed=seed).measure(objective)["loss"]
    assert exact == pytest.approx(np.mean(losses), rel=1e-6)
    rounded = validation(stored, hard_negatives=count, seed=seed, bf16=True).measure(objective)["loss"]
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.05)


def test_what_the_objective_draws_is_the_same_at_every_evaluation_which_leaves_no_trace(objective):
    it = validation(seed=4)
    objective.batch_group = "the ranks of a batch"
    seed_generators()
    expected = draw_from_generators()
    seed_generators()
    first = it.measure(objective)
    assert draw_from_generators() == expected
    draws = list(objective.draws)
    assert len(set(draws)) == 5
    assert it.measure(objective) == first
    assert objective.draws == draws * 2
    assert validation(seed=5).measure(objective)["draw"] != first["draw"]
    assert objective.batch_group == "the ranks of a batch"
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_what_decides():
    it = validation(then={"measure": "positive_rank", "after_epoch": 1}, every=7, patience=3)
    assert (it.every, it.patience) == (7, 3)
    assert it.criteria == (
        Criterion("loss", higher_is_better=False),
        Criterion("positive_rank", higher_is_better=False, start=11),
    )


@pytest.mark.parametrize("settings", [{"measure": "accuracy"}, {"then": {"measure": "accuracy", "after_epoch": 1}}])
def test_a_measure_that_the_objective_lacks(objective, settings):
    message = r"'accuracy', but this objective doesn't measure it. It measures loss, draw, pos"
    with pytest.raises(UserError, match=message):
        validation(**settings).measure(objective)


def test_batches_that_do_not_fit_are_named(objective, tmp_path):
    objective.refused = MadeUpBatches().read(0, 3)["query"][0].as_py()
    with pytest.raises(UserError, match="Batch 3 of epoch 0 in made/up: Row 0 is refused"):
        validation().measure(objective)
    assert objective.training
    objective.columns = ("query", "document", "masked")
    with pytest.raises(UserError, match="made/up have no column masked, which this objective reads"):
        validation().measure(objective)
    with pytest.raises(UserError, match="holds no batch to validate on"):
        validation(MadeUpBatches(0))
    with pytest.raises(UserError, match="holds no artifact"):
        build_validation(BatchValidationSettings(batches=str(tmp_path)), bf16=False, epoch_ends=[10])
