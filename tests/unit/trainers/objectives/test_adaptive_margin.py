"""Adaptive relevance margins against the paper's equations, and what the objective makes of stored triplets."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyEncoder, assert_same, gradients_of
from tests.unit.trainers.triplet_batches import triplet_batch
from trainers.objectives.adaptive_margin import (
    AdaptiveMargin,
    distributed_residuals,
    in_batch_residuals,
    mean_error,
    own_residuals,
)
from trainers.objectives.pair_settings import AdaptiveMarginSettings
from trainers.objectives.pairs import Triplets, unit_vectors

FORMS = [
    {"target": "static", "margin": 0.3},
    {"target": "adaptive"},
    {"target": "static", "margin": 1.0, "in_batch": True},
    {"target": "adaptive", "in_batch": True},
    {"target": "adaptive", "in_batch": True, "pairing": "released"},
    {"target": "distributed"},
    {"target": "distributed", "pairing": "released"},
]
FORM_NAMES = ["-".join(map(str, form.values())) for form in FORMS]
each_form = pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)


def random_triplets(seed: int, count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 4, dtype=torch.float64, generator=generator) for _ in range(3)]


def phi(a, b) -> float:
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def literal_residuals(q, p, n, target="distributed", margin=None, in_batch=False, pairing="paper") -> list[float]:
    """The paper's equations 1 to 3, one term after the other."""
    found = []
    for i, j in itertools.product(range(len(q)), repeat=2):
        row = i if pairing == "paper" else j  # whose positive the authors' broadcast meets
        if target == "distributed":
            found.append(phi(q[row], p[row]) - phi(q[row], n[row]) - (1 + phi(p[i], n[j])) / 2)
        elif in_batch or i == j:
            epsilon = (1 + phi(p[i], n[j])) / 2 if margin is None else margin
            found.append(phi(q[row], p[row]) - phi(q[i], n[j]) - epsilon)
    return found


def residuals_of(form, q, p, n) -> torch.Tensor:
    triplets = Triplets(*map(unit_vectors, (q, p, n)))
    if form["target"] == "distributed":
        return distributed_residuals(triplets, triplets, form.get("pairing", "paper"))[0]
    if form.get("in_batch"):
        return in_batch_residuals(triplets, triplets, form.get("margin"), form.get("pairing", "paper"))[0]
    return own_residuals(triplets, form.get("margin"))[0]


@each_form
def test_residuals_are_the_papers_equations(form):
    """So neither the lengths of vectors nor the order of rows matter."""
    for seed in range(3):
        vectors = random_triplets(seed)
        expected = literal_residuals(*(v.numpy() for v in vectors), **form)
        np.testing.assert_allclose(residuals_of(form, *vectors).flatten(), expected, rtol=1e-12, atol=1e-14)


@each_form
@pytest.mark.parametrize("error", ["squared", "absolute", "soft"])
def test_the_gradient_is_the_derivative(form, error):
    inputs = [vectors.requires_grad_() for vectors in random_triplets(1, 3)]
    assert torch.autograd.gradcheck(lambda *qpn: mean_error(residuals_of(form, *qpn), error), inputs)


@each_form
def test_a_vector_of_zeros_has_similarity_zero_and_no_gradient(form):
    inputs = random_triplets(5)
    for vectors in inputs:
        vectors[2] = 0
        vectors.requires_grad_()
    residuals = residuals_of(form, *inputs)
    mean_error(residuals).backward()
    target = form.get("margin", 0.5)
    if residuals.ndim == 1:
        assert residuals[2].item() == -target
    for vectors in inputs:
        assert vectors.grad.isfinite().all()
        assert not vectors.grad[2].any()
        assert vectors.grad.any()


@each_form
def test_cosines_are_float32_under_autocast(form):
    vectors = torch.cat(random_triplets(6))
    exact, single, halves = (
        AdaptiveMargin(Fixed(given), AdaptiveMarginSettings(**form))
        for given in (vectors, vectors.float(), vectors.bfloat16())
    )
    batch = exact.collate(triplet_batch(0, 5))
    with torch.autocast("cpu", torch.bfloat16):
        found = single(batch)
    assert found.loss.item() == pytest.approx(exact(batch).loss.item(), rel=1e-5)
    assert halves(batch).loss.dtype == torch.float32


class Fixed(TinyEncoder):
    """Gives the same vectors whatever the texts."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors = vectors

    def forward(self, features):
        return self.vectors[: len(features["input_ids"])]


def tiny_objective(dropout: float = 0.0, dtype: torch.dtype = torch.float64, **settings) -> AdaptiveMargin:
    torch.manual_seed(7)
    return AdaptiveMargin(TinyEncoder(dropout).to(dtype), AdaptiveMarginSettings(**settings))


@each_form
def test_a_stored_batch_means_what_its_columns_say_in_chunks_of_any_size(form):
    rows, gradients = triplet_batch(5), []
    columns = (
        rows["query"].to_pylist(),
        rows["document"].to_pylist(),
        [text for (text,) in rows["hard_negatives"].to_pylist()],
    )
    for chunk_size, gradient_cache in ((None, False), (1, True), (2, False), (2, True), (4, False), (5, True)):
        objective = tiny_objective(**form, chunk_size=chunk_size, gradient_cache=gradient_cache)
        outcome = objective(objective.collate(rows.select(list(objective.columns))))
        encoder = objective.encoder("query")
        q, p, n = (
            torch.cat([encoder(encoder.tokenize([text], role)) for text in texts]).detach().numpy()
            for texts, role in zip(columns, ("query", "document", "document"), strict=True)
        )
        residuals = literal_residuals(q, p, n, **form)
        assert outcome.loss.item() == pytest.approx(np.mean(np.square(residuals)), rel=1e-10)
        distinct = [*set(columns[0]), *set(columns[1] + columns[2])]  # a prompt token each
        assert (outcome.examples, outcome.tokens) == (6, sum(1 + len(text.split()) for text in distinct))
        assert not any(metric.requires_grad for metric in outcome.metrics.values())
        outcome.loss.backward()
        gradients.append(gradients_of(objective))
        assert_same(gradients[-1], gradients[0], 1e-12)
    own_positive, own_negative = ([phi(q[i], other[i]) for i in range(6)] for other in (p, n))
    targets = [
        (1 + phi(a, b)) / 2 for i, a in enumerate(p) for j, b in enumerate(n) if objective.settings.uses_batch or i == j
    ]
    if form["target"] == "static":
        targets = [form["margin"]]
    assert {name: value.item() for name, value in outcome.metrics.items()} == {
        "target_min": pytest.approx(min(targets)),
        "target_mean": pytest.approx(np.mean(targets)),
        "target_max": pytest.approx(max(targets)),
        "margin_mean": pytest.approx(np.mean(own_positive) - np.mean(own_negative)),
        "accuracy": pytest.approx(np.mean(np.greater(own_positive, own_negative))),
        "positive_similarity": pytest.approx(np.mean(own_positive)),
        "negative_similarity": pytest.approx(np.mean(own_negative)),
    }


def test_equal_texts_are_encoded_once_in_chunks_of_one_length_and_none_beyond_its_own():
    rows = triplets(["w1 w2", "w1 w2", "w3"], ["w1 w2", "w5", "w6 w7 w8 w9"], [["w5"], ["w1 w2"], ["w5"]])
    batch = tiny_objective(chunk_size=2).collate(rows)
    assert [chunk["input_ids"].shape for chunk in batch.documents.chunks] == [(2, 5), (2, 3), (1, 2)]
    assert len(batch) == 3
    assert batch.tokens == 5 + 3 + 3 + 2 + 2
    rows = triplets(["w1 w2 w3"], ["w1 w2 w3 w4"], [["w5 w6 w7 w8 w9"]])
    batch = tiny_objective(query_max_length=2, document_max_length=3).collate(rows)
    assert batch.documents.chunks[0]["attention_mask"].sum(dim=1).tolist() == [3, 3, 2]


def triplets(queries: list[str], documents: list[str], negatives: list[list[str]]) -> pa.Table:
    columns = {"query": queries, "document": documents, "hard_negatives": pa.array(negatives, pa.list_(pa.string()))}
    return pa.table(columns)


@pytest.mark.parametrize(("negatives", "message"), [
    (["w1", "w2"], r"Query 'w4 w5' has 2 hard negatives; a triplet has .* Set training.hard_negatives .*to 1"),
    ([], r"Query 'w4 w5' has 0 hard negatives; .* is 0, set it to 1; otherwise make .*negatives_per_example: 1"),
])  # fmt: skip
def test_a_row_without_exactly_one_hard_negative_is_refused(negatives, message):
    rows = triplets(["w1", "w2", "w4 w5"], ["w1"] * 3, [["w1"], ["w2"], negatives])
    with pytest.raises(UserError, match=message):
        tiny_objective().collate(rows.slice(1))


def test_what_queries_are_compared_with_and_steps_are_joined_where_negatives_are_shared():
    rows = triplet_batch(1)
    own, in_batch = (tiny_objective(**form).comparisons(rows) for form in (FORMS[1], FORMS[5]))
    assert (own.queries, own.positives, own.hard, own.in_batch, own.masked) == (6, 1, 1, 0, 0)
    assert (own.documents, own.offered) == (12, 0)
    assert (in_batch.in_batch, in_batch.documents, in_batch.offered) == (5, 12, 6)
    assert tiny_objective(share_negatives="step").joins_step
    assert not tiny_objective().joins_step
