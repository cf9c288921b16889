"""The masked contrastive loss against its equation, and what the objective makes of a stored batch."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tests.unit.trainers.tiny import assert_same, gradients_of, random_batch, tiny_objective
from trainers.objective import to_device
from trainers.objectives.contrastive import contrastive_metrics
from trainers.objectives.masked_contrastive import all_directions_loss, distillation_loss, masked_contrastive_loss
from trainers.objectives.pair_settings import ContrastiveSettings


def random_problem(seed: int, queries: int = 5, documents: int = 9):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, 4, dtype=torch.float64, generator=generator)
    d = torch.randn(documents, 4, dtype=torch.float64, generator=generator)
    positives = torch.randperm(documents, generator=generator)[:queries]
    mask = torch.rand(queries, documents, generator=generator) < 0.4
    mask[torch.arange(queries), positives] = False
    return q, d, mask, positives


def literal_loss(q, d, mask, positives, temperature):
    """Eq. 4 of the paper, one term after the other."""
    total = 0.0
    for i in range(len(q)):
        kept = [j for j in range(len(d)) if not mask[i, j]]
        denominator = sum(math.exp(float(q[i] @ d[j]) / temperature) for j in kept)
        total -= math.log(math.exp(float(q[i] @ d[positives[i]]) / temperature) / denominator)
    return total / len(q)


def test_the_loss_is_the_papers_equation_and_its_gradient_the_derivative():
    """So what is masked has no influence."""
    for seed in range(4):
        problem = random_problem(seed)
        for temperature in (0.3, 1.0, 5.0):
            found = masked_contrastive_loss(*problem, temperature)
            assert found.item() == pytest.approx(literal_loss(*problem, temperature), rel=1e-12)
    q, d, mask, positives = random_problem(0)
    q.requires_grad_(), d.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, d: masked_contrastive_loss(q, d, mask, positives, 0.5), (q, d))


def literal_loss_of_all_directions(q, d, mask, temperature):
    """A pair against all that stands beside either of its two, one term after the other; row i's positive is d[i]."""

    def term(a, b):
        return math.exp(float(a @ b) / temperature)

    total = 0.0
    for i in range(len(q)):
        denominator = sum(term(q[i], d[j]) for j in range(len(d)) if not mask[i, j])
        for j in range(len(q)):
            if j != i and not mask[j, i]:
                denominator += term(d[i], q[j])
            if j != i and not mask[i, j] and not mask[j, i]:
                denominator += term(q[i], q[j]) + term(d[i], d[j])
        total -= math.log(term(q[i], d[i]) / denominator)
    return total / len(q)


def test_all_directions_are_told_apart_and_a_mask_holds_in_each():
    for seed in range(4):
        q, d, mask, _ = random_problem(seed)
        positives = torch.arange(len(q))
        mask[positives, positives] = False
        expected = literal_loss_of_all_directions(q, d, mask, 0.7)
        found = all_directions_loss(q, d, mask, positives, 0.7, q, mask[:, : len(q)])
        assert found.item() == pytest.approx(expected, rel=1e-12)
        rows = [
            all_directions_loss(q[rows], d, mask[rows], positives[rows], 0.7, q, mask[:, : len(q)])
            for rows in (slice(0, 2), slice(2, 5))
        ]
        assert (2 * rows[0] + 3 * rows[1]).item() / 5 == pytest.approx(expected, rel=1e-12)  # as two ranks have them
    q.requires_grad_(), d.requires_grad_()
    arguments = mask, positives, 0.5
    loss = lambda q, d: all_directions_loss(q, d, *arguments, q, mask[:, : len(q)])  # noqa: E731
    assert torch.autograd.gradcheck(loss, (q, d))


def literal_distillation(q, d, scores, temperature, teacher_temperature):
    """Minus the mean of sum_j p_ij log q_ij, one term after the other."""
    total = 0.0
    for i in range(len(q)):
        wanted = [math.exp(float(score) / teacher_temperature) for score in scores[i]]
        own = [math.exp(float(q[i] @ each) / temperature) for each in d]
        total -= sum(w / sum(wanted) * math.log(o / sum(own)) for w, o in zip(wanted, own, strict=True))
    return total / len(q)


def test_a_distillation_is_least_where_the_student_scores_as_its_teacher():
    for seed in range(4):
        q, d, _, _ = random_problem(seed)
        scores = torch.randn(len(q), len(d), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found = distillation_loss(q, d, scores, 0.5, 2.0)
        assert found.item() == pytest.approx(literal_distillation(q, d, scores, 0.5, 2.0), rel=1e-12)
        q.requires_grad_()
        assert torch.autograd.gradcheck(lambda q, d=d, s=scores: distillation_loss(q, d, s, 0.5, 2.0), (q,))
        own = distillation_loss(q, d, (q @ d.T).detach() * 4, 0.5, 2.0)  # the same distribution
        own.backward()
        assert q.grad.abs().max() < 1e-12
        entropy = torch.distributions.Categorical(logits=(q @ d.T) / 0.5).entropy().mean()
        assert own.item() == pytest.approx(entropy.item(), rel=1e-12)


def test_a_query_whose_teacher_says_nothing_learns_nothing():
    q, d, _, _ = random_problem(1)
    scores = torch.randn(len(q), len(d), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    told = literal_distillation(q, d, scores, 0.5, 2.0) * len(q) - literal_distillation(q[:1], d, scores, 0.5, 2.0)
    scores[0] = 0  # of a zero vector
    q.requires_grad_()
    found = distillation_loss(q, d, scores, 0.5, 2.0)
    found.backward()
    assert found.item() == pytest.approx(told / len(q), rel=1e-12)
    assert q.grad[0].abs().max() == 0 < q.grad[1:].abs().amax(dim=1).min()


def test_similarities_are_float32_under_autocast():
    q, d, mask, _ = random_problem(2)
    mask.fill_diagonal_(False)
    scores = torch.randn(len(q), len(d))

    def losses(q, d):
        rest = mask, torch.arange(len(q)), 0.02
        distilled = distillation_loss(q, d, scores.to(q), 0.02, 0.05)
        return masked_contrastive_loss(q, d, *rest), all_directions_loss(q, d, *rest, q, mask[:, : len(q)]), distilled

    with torch.autocast("cpu", torch.bfloat16):
        found, halves = losses(q.float(), d.float()), losses(q.bfloat16(), d.bfloat16())
    assert [each.item() for each in found] == pytest.approx([each.item() for each in losses(q, d)], rel=1e-5)
    assert {each.dtype for each in halves} == {torch.float32}


def test_metrics_against_a_literal_count():
    q, d, mask, positives = random_problem(3)
    d[int(positives[0]) - 1] = d[int(positives[0])]  # a tie with the first query's positive
    mask[0, int(positives[0]) - 1] = False
    similarities = (q @ d.T).numpy()
    ranks, own, others = [], [], []
    for i, p in enumerate(positives.tolist()):
        rivals = [similarities[i, j] for j in range(len(d)) if j != p and not mask[i, j]]
        ranks.append(1 + sum(s >= similarities[i, p] for s in rivals))
        own.append(similarities[i, p])
        others.append(np.mean(rivals))
    found = {name: value.item() for name, value in contrastive_metrics(q, d, mask, positives).items()}
    assert ranks[0] >= 2
    assert found == {
        "accuracy": pytest.approx(np.mean(np.array(ranks) == 1)),
        "positive_rank": pytest.approx(np.mean(ranks)),
        "positive_similarity": pytest.approx(np.mean(own)),
        "negative_similarity": pytest.approx(np.mean(others)),
    }


@pytest.mark.parametrize("directions", ["query_to_document", "all"])
@pytest.mark.parametrize("similarity", ["cosine", "inner_product"])
def test_a_stored_batch_means_what_its_columns_say_in_chunks_of_any_size(similarity, directions):
    rows = random_batch(5).append_column("batch", pa.array([3] * 6, pa.int32()))
    hard_negatives = [text for texts in rows["hard_negatives"].to_pylist() for text in texts]
    written = rows["document"].to_pylist() + hard_negatives
    masked = rows["masked"].to_pylist()
    mask = torch.tensor([[column in masked[row] for column in range(len(written))] for row in range(6)])
    assert hard_negatives
    assert mask.sum() > 3
    gradients = []
    for chunk_size, gradient_cache in ((None, False), (1, True), (2, False), (2, True), (4, False), (5, True)):
        objective = tiny_objective(
            dtype=torch.float64, similarity=similarity, similarity_temperature=0.5, chunk_size=chunk_size,
            gradient_cache=gradient_cache, directions=directions,
        )  # fmt: skip
        outcome = objective(objective.collate(rows.select(list(objective.columns))))
        encode, tokenize = objective.query_encoder, objective.query_encoder.tokenize
        q = torch.cat([encode(tokenize([text], "query")) for text in rows["query"].to_pylist()]).detach()
        d = torch.cat([encode(tokenize([text], "document")) for text in written]).detach()
        if similarity == "cosine":
            q, d = nn.functional.normalize(q, dim=1), nn.functional.normalize(d, dim=1)
        expected = (
            literal_loss(q, d, mask, range(6), 0.5)
            if directions == "query_to_document"
            else literal_loss_of_all_directions(q, d, mask, 0.5)
        )
        assert outcome.loss.item() == pytest.approx(expected, rel=1e-10)
        assert outcome.examples == 6
        assert not any(metric.requires_grad for metric in outcome.metrics.values())
        outcome.loss.backward()
        gradients.append(gradients_of(objective))
        assert_same(gradients[-1], gradients[0], 1e-12)


@pytest.mark.parametrize("similarity", ["cosine", "inner_product"])
@pytest.mark.parametrize("directions", ["query_to_document", "all"])
def test_a_share_of_the_loss_is_distilled_from_the_batchs_own_documents(directions, similarity):
    rows = random_batch(5).append_column("batch", pa.array([3] * 6, pa.int32()))
    scores = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    rows = rows.append_column("surrogate_scores", pa.array(list(scores)))
    found, gradients = {}, []
    for share, chunks in ((0.0, {}), (1.0, {}), (0.3, {}), (0.3, {"chunk_size": 2, "gradient_cache": True})):
        objective = tiny_objective(
            dtype=torch.float64, distillation=share, teacher_temperature=0.7, directions=directions, **chunks,
            similarity=similarity,
        )  # fmt: skip
        assert ("surrogate_scores" in objective.columns) == (share > 0)
        outcome = objective(objective.collate(rows.select(list(objective.columns))))
        outcome.loss.backward()
        found[share] = outcome.loss.item()
        gradients.append(gradients_of(objective))
    encode, tokenize = objective.query_encoder, objective.query_encoder.tokenize
    q, d = (encode(tokenize(rows[name].to_pylist(), name)).detach() for name in ("query", "document"))
    if similarity == "cosine":
        q, d = nn.functional.normalize(q, dim=1), nn.functional.normalize(d, dim=1)
    assert found[1.0] == pytest.approx(literal_distillation(q, d, scores, 0.05, 0.7), rel=1e-10)
    assert found[0.3] == pytest.approx(0.7 * found[0.0] + 0.3 * found[1.0], rel=1e-12)
    assert_same(gradients[3], gradients[2], 1e-12)


def batch_of(documents, hard_negatives=None, masked=None) -> pa.Table:
    count = len(documents)
    return pa.table(
        {
            "query": ["w4 w5"] * count,
            "document": documents,
            "hard_negatives": pa.array(hard_negatives or [[]] * count, pa.list_(pa.string())),
            "masked": pa.array(masked or [[]] * count, pa.list_(pa.int32())),
        }
    )


def test_equal_texts_are_encoded_once_and_none_beyond_its_length():
    batch = tiny_objective().collate(batch_of(["w1", "w1", "w2"], [["w2"], [], ["w3"]]))
    assert [len(chunk["input_ids"]) for chunk in batch.documents.chunks] == [3]
    assert len(batch.documents.order) == 5
    batch = tiny_objective(query_max_length=2, document_max_length=3).collate(batch_of(["w1 w2 w3 w4 w5"] * 2))
    assert batch.queries.chunks[0]["input_ids"].shape == (1, 2)
    assert batch.documents.chunks[0]["input_ids"].shape == (1, 3)


def test_collating_a_slice_of_a_table_sees_only_its_rows():
    rows = batch_of(["w1", "w2", "w3"], [["w7"], ["w8", "w9"], []], [[1], [3], [0, 4]])
    batch = tiny_objective().collate(rows.slice(1, 2))
    assert len(batch.documents.order) == 4
    assert batch.masked_rows.tolist() == [0, 1, 1]
    assert batch.masked_columns.tolist() == [3, 0, 4]


def test_by_default_chunks_suit_the_processor():
    settings = ContrastiveSettings()
    mask = torch.ones(600, 64, dtype=torch.int64)
    features = {"input_ids": mask, "attention_mask": mask}
    for device, tokens in (("cpu", 2_048), ("meta", 16_384)):
        chunks = settings.cut(features, torch.nn.Linear(1, 1, device=device)).chunks
        assert [chunk["input_ids"].numel() for chunk in chunks[:-1]] == [tokens] * (600 * 64 // tokens)


def test_a_batch_moves_between_devices_whole():
    batch = tiny_objective(chunk_size=2).collate(random_batch(1))
    moved = to_device(batch, torch.device("meta"))
    assert {t.device.type for chunk in moved.documents.chunks for t in chunk.values()} == {"meta"}
    assert moved.queries.order.device.type == moved.masked_rows.device.type == "meta"
    assert moved.tokens == batch.tokens
