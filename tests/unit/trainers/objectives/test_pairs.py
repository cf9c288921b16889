"""What a loss is over: masks, positives and order of candidates, over batches, steps and rows in any order."""

import numpy as np
import pytest
import torch

from tests.unit.trainers.several_batches import as_one_batch, several_batches
from tests.unit.trainers.tiny import assert_same, gradients_of, random_batch, tiny_objective, with_columns
from tests.unit.trainers.tiny_multi_vector import ALL_TOKENS, LAYERS, tiny_multi_layer
from trainers.objective import Comparisons
from trainers.objectives.pairs import positives_in_step, score_candidates

OBJECTIVES = {
    "contrastive": lambda **settings: tiny_objective(dtype=torch.float64, **settings),
    "layers": lambda **settings: tiny_multi_layer(LAYERS, "self_contrastive", **settings),
    "all tokens": lambda **settings: tiny_multi_layer(ALL_TOKENS, "multi_vector", **settings),
}


def test_other_batches_leave_out_what_answers_the_query():
    queries = torch.tensor([1, 2, 1, 3])
    texts = torch.tensor([10, 20, 11, 10, 11, 20, 99])  # the four queries' positives, then other texts
    found = positives_in_step(queries, queries, texts).int().tolist()
    assert found == [
        [1, 0, 1, 1, 1, 0, 0],  # query 1 is answered by 10 and 11
        [0, 1, 0, 0, 0, 1, 0],
        [1, 0, 1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
    ]
    assert positives_in_step(queries[2:3], queries, texts).int().tolist() == found[2:3]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_masks_over_several_batches_against_brute_force(count):
    rows = several_batches(count)
    objective = tiny_objective(share_negatives="step")
    assert objective.joins_step
    batch = objective.collate(rows)
    for each in (batch, tiny_objective().collate(rows)):
        assert {value.dtype for value in vars(each).values() if isinstance(value, torch.Tensor)} == {torch.int64}
    candidates = score_candidates(batch, objective.gather, 0, [len(batch.text_keys)])
    expected = as_one_batch(rows)["masked"].to_pylist()
    assert [row.nonzero()[:, 0].tolist() for row in candidates.mask] == expected
    assert candidates.positives.tolist() == list(range(6 * count))
    assert candidates.order.tolist() == list(range(candidates.mask.shape[1]))
    if count == 4:
        stored = sum(map(len, rows["masked"].to_pylist()))
        assert sum(map(len, expected)) > stored + 20  # other batches add some


def test_every_column_of_a_stored_batch_may_be_masked():
    rows = several_batches(2)
    own = rows.slice(0, 6)
    columns = 6 + sum(map(len, own["hard_negatives"].to_pylist()))
    assert columns > 8
    objective = tiny_objective(share_negatives="step")
    for column in range(1, columns):
        masked = with_columns(rows, masked=[[column], *[[]] * (len(rows) - 1)])
        batch = objective.collate(masked)
        candidates = score_candidates(batch, objective.gather, 0, [len(batch.text_keys)])
        expected = as_one_batch(masked)["masked"].to_pylist()
        assert [row.nonzero()[:, 0].tolist() for row in candidates.mask] == expected, column


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_as_one_loss_is_one_large_batch(name):
    rows = several_batches(3)
    joined, alone = OBJECTIVES[name](share_negatives="step"), OBJECTIVES[name]()
    outcomes = joined(joined.collate(rows)), alone(alone.collate(as_one_batch(rows)))
    for outcome in outcomes:
        outcome.loss.backward()
    assert outcomes[0].loss.item() == pytest.approx(outcomes[1].loss.item(), rel=1e-14)
    assert_same(outcomes[0].metrics, outcomes[1].metrics, 1e-12)
    assert_same(gradients_of(joined), gradients_of(alone), 1e-12)


def test_comparisons_count_what_a_loss_is_over():
    rows, objective = random_batch(5), tiny_objective()
    pools = [len(pool) for pool in rows["hard_negatives"].to_pylist()]
    masked = sum(map(len, rows["masked"].to_pylist()))
    found = objective.comparisons(rows)
    assert found == Comparisons(
        queries=6,
        documents=6 + sum(pools),
        positives=1.0,
        in_batch=pytest.approx(np.mean([5 + sum(pools) - pool for pool in pools])),
        hard=pytest.approx(np.mean(pools)),
        masked=pytest.approx(masked / 6),
    )
    batch = objective.collate(rows)
    mask = score_candidates(batch, objective.gather, 0, [len(batch.text_keys)]).mask
    assert (~mask).sum(dim=1).float().mean() - 1 == pytest.approx(found.in_batch + found.hard - found.masked)

    found = tiny_objective().comparisons(with_columns(rows, hard_negatives=[["w1"]] * 6))
    assert found.in_batch + found.hard == 2 * (6 - 1) + 1  # as the paper counts


def test_tokens_are_those_that_are_encoded():
    rows, objective = random_batch(5), tiny_objective(chunk_size=2, document_max_length=4)
    outcome = objective(objective.collate(rows))
    documents = rows["document"].to_pylist() + [t for pool in rows["hard_negatives"].to_pylist() for t in pool]
    lengths = [1 + len(text.split()) for text in set(rows["query"].to_pylist())]
    lengths += [min(4, 1 + len(text.split())) for text in set(documents)]
    assert outcome.tokens == sum(lengths)


def test_held_documents_are_passed_back_last_and_gradients_stay_the_same():
    """Nothing is held where two towers read, or nothing is trained."""
    rows = random_batch(5)

    def gradients(may_hold: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        objective = tiny_objective(dropout=0.3, dtype=torch.float64)
        objective.may_hold = may_hold
        torch.manual_seed(1)
        before_last: list[dict[str, np.ndarray]] = []
        outcome = objective(objective.collate(rows))
        outcome.backward(3, before_last=lambda: before_last.append(gradients_of(objective)))
        return before_last[0], gradients_of(objective)

    (nothing, expected), (of_queries, found) = gradients(may_hold=False), gradients(may_hold=True)
    assert not nothing
    assert_same(found, expected, 1e-12)
    assert of_queries.keys() == expected.keys()
    for name, gradient in expected.items():
        assert not np.array_equal(of_queries[name], gradient), name

    objective, layers = tiny_objective(), tiny_multi_layer(LAYERS, "self_contrastive")
    objective.may_hold = layers.may_hold = True
    with torch.no_grad():
        assert objective(objective.collate(rows)).held is None
    assert layers(layers.collate(rows)).held is None
