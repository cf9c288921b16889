"""MarginMSE against the paper's equation, and what the objective makes of stored triplets with a teacher's scores."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytriever.errors import UserError
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from tests.unit.trainers.tiny import TinyEncoder, learn
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
    outcome = objective(objective.collate(rows.select(list(objective.columns))))
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
    rows = triplet_batch(1)
    scores = [0.0, 0.0, score, 0.0, 0.0, 0.0]
    column = rows.schema.get_field_index("positive_score")
    rows = rows.set_column(column, "positive_score", pa.array(scores, pa.float32()))
    query = rows["query"][2].as_py()
    with pytest.raises(UserError, match=f"Query {query!r} has a teacher score that is no finite number"):
        tiny_objective().collate(rows)


def test_negatives_that_are_drawn_in_training_keep_their_scores():
    pools = [[f"w{row} w{place}" for place in range(4)] for row in range(6)]
    scores = [[row + place / 10 for place in range(4)] for row in range(6)]
    rows = triplet_batch(1)
    for name, values, kind in (("hard_negatives", pools, pa.string()), ("hard_negative_scores", scores, pa.float32())):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, pa.list_(kind)))
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


def test_a_transformer_learns_the_teachers_margins(tiny_encoder):
    encoder = load_encoder(EncoderSettings(model=str(tiny_encoder), pooling="cls"), tiny_encoder, "f" * 64, dropout=0.0)
    rows = pa.table(
        {
            "query": ["pops at both ends?", "which arguments?"],
            "document": ["A deque appends and pops at both ends.", "The parser reads arguments."],
            "hard_negatives": [["The parser reads arguments."], ["An event loop runs coroutines."]],
            "positive_score": pa.array([9.0, 4.0], pa.float32()),
            "hard_negative_scores": pa.array([[1.0], [3.0]], pa.list_(pa.float32())),
        }
    )
    objective = MarginMse(encoder, MarginMseSettings(chunk_size=3))
    outcomes = learn(objective, [objective.collate(rows)] * 80, 2e-3)
    assert outcomes[-1].loss < outcomes[0].loss / 20
    assert outcomes[-1].metrics["margin_mean"].item() == pytest.approx(4.5, abs=0.5)
