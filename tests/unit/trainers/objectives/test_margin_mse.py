"""MarginMSE against the paper's equation, and what the objective makes of stored triplets with a teacher's scores."""

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyEncoder, with_columns
from tests.unit.trainers.triplet_batches import triplet_batch
from trainers.engine.draws import draw_hard_negatives
from trainers.objectives.margin_mse import MarginMse, margin_mse_loss
from trainers.objectives.pair_settings import MarginMseSettings


def test_the_loss_is_the_papers_equation_and_its_gradient_the_derivative():
    scores = torch.randn(4, 7, dtype=torch.float64)
    student_positive, student_negative, positive, negative = scores
    expected = np.mean(
        [((student_positive[i] - student_negative[i]) - (positive[i] - negative[i])).item() ** 2 for i in range(7)]
    )
    assert margin_mse_loss(*scores).item() == pytest.approx(expected, rel=1e-12)
    # only margins count: what a teacher adds to all scores of a query changes nothing
    shifted = margin_mse_loss(student_positive + 3, student_negative + 3, positive - 9, negative - 9)
    assert shifted.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(margin_mse_loss, [row.requires_grad_() for row in scores[:, :3].clone()])


def tiny_objective(**settings) -> MarginMse:
    torch.manual_seed(7)
    return MarginMse(TinyEncoder().double(), MarginMseSettings(**settings))


@pytest.mark.parametrize("similarity", ["inner_product", "cosine"])
@pytest.mark.parametrize("cut", [{}, {"chunk_size": 2, "gradient_cache": True}], ids=str)
def test_a_stored_batch_means_what_its_columns_say(similarity, cut):
    objective, rows = tiny_objective(similarity=similarity, teacher_scale=0.1, **cut), triplet_batch(5)
    outcome = objective(batch := objective.collate(rows.select(list(objective.columns))))
    assert (batch.pool_sizes.dtype, batch.masked_rows.dtype) == (torch.int64, torch.int64)
    assert objective.similarity == similarity
    encoder, errors = objective.encoder("document"), []
    for row in rows.to_pylist():
        q, p, n = (
            encoder(encoder.tokenize([text], role)).detach()[0]
            for text, role in (
                (row["query"], "query"),
                (row["document"], "document"),
                (row["hard_negatives"][0], "document"),
            )
        )
        if similarity == "cosine":
            q, p, n = (v / v.norm() for v in (q, p, n))
        teacher = row["positive_score"] - row["hard_negative_scores"][0]
        errors.append((q @ p - q @ n - 0.1 * teacher).item() ** 2)
    assert outcome.loss.item() == pytest.approx(np.mean(errors), rel=1e-10)
    assert (outcome.examples, outcome.tokens > 18) == (6, True)
    assert not any(metric.requires_grad for metric in outcome.metrics.values())


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused(score):
    rows = with_columns(triplet_batch(1), positive_score=[0.0, 0.0, score, 0.0, 0.0, 0.0])
    query = rows["query"][2].as_py()
    with pytest.raises(UserError, match=f"Query {query!r} has a teacher score that is not a finite number"):
        tiny_objective().collate(rows)


def test_negatives_that_are_drawn_in_training_keep_their_scores():
    pools = [[f"w{row} w{place}" for place in range(4)] for row in range(6)]
    scores = [[row + place / 10 for place in range(4)] for row in range(6)]
    rows = with_columns(triplet_batch(1), hard_negatives=pools, hard_negative_scores=scores)
    rows = rows.drop_columns("hard_negative_ids")
    drawn = draw_hard_negatives(rows, 1, seed=0, epoch=0)
    places = [pool.index(text) for pool, (text,) in zip(pools, drawn["hard_negatives"].to_pylist(), strict=True)]
    assert len(set(places)) > 1
    expected = [row + place / 10 for row, place in enumerate(places)]
    batch = tiny_objective().collate(drawn)
    assert batch.negative_scores.tolist() == pytest.approx(expected)


def test_the_loss_is_float32_under_autocast():
    torch.manual_seed(7)
    objective = MarginMse(TinyEncoder(), MarginMseSettings())
    batch = objective.collate(triplet_batch(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert objective(batch).loss.dtype == torch.float32
