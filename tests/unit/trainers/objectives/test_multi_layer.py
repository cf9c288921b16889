"""Documents of several vectors: losses against the paper's equations, batches, metrics, training and export."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval.encoders.specification import EncoderSettings, VectorForm
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.objectives.contextual.made_up import rows_of
from tests.unit.trainers.tiny import assert_same, gradients_of, learn, random_batch
from tests.unit.trainers.tiny_multi_vector import COMBINATIONS, FORMS, LAYERS, SEVERAL, tiny_multi_layer
from trainers.objectives.multi_layer import (
    MultiLayer,
    best_vector,
    max_similarity,
    multi_vector_loss,
    reduced_vector_loss,
    self_contrastive_loss,
    self_contrastive_regulariser,
    vector_similarities,
)
from trainers.objectives.pair_settings import MultiLayerSettings


def literal_loss(q, documents, mask, training_form, reduced, weight, temperature=1.0) -> float:
    """Eq. 2, 3, 5, 6 and 7, one term after the other; ``documents`` are lists of vectors, positives come first."""
    total = 0.0
    for i, query in enumerate(q):
        similarities = [[float(query @ h) / temperature for h in vectors] for vectors in documents]
        scores = []
        for j, of_document in enumerate(similarities):
            takes_reduced = training_form == "last_reg" or (training_form == "self_contrastive" and i == j)
            scores.append(of_document[reduced] if takes_reduced else max(of_document))
        denominator = sum(math.exp(score) for j, score in enumerate(scores) if not mask[i][j])
        total -= math.log(math.exp(scores[i]) / denominator)
        if training_form != "multi_vector":
            own = similarities[i]
            total -= weight * math.log(math.exp(own[reduced]) / sum(map(math.exp, own)))
    return total / len(q)


class Problem:
    """4 queries and 7 documents of up to 3 vectors, the positives among them first."""

    def __init__(self, seed: int, all_present: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(4, 5, dtype=torch.float64, generator=generator)
        self.d = torch.randn(7, 3, 5, dtype=torch.float64, generator=generator)
        self.present = torch.rand(7, 3, generator=generator) < (1.1 if all_present else 0.6)
        self.present[:, 0] = True
        self.mask = torch.rand(4, 7, generator=generator) < 0.3
        self.positives = torch.arange(4)
        self.mask[self.positives, self.positives] = False


def problem_loss(problem: Problem, training_form: str, reduced: int, weight=0.7, temperature=1.0) -> Tensor:
    similarities = vector_similarities(problem.q, problem.d, problem.present) / temperature
    losses = {
        "multi_vector": multi_vector_loss,
        "self_contrastive": self_contrastive_loss,
        "last_reg": reduced_vector_loss,
    }[training_form](similarities, problem.mask, problem.positives, reduced)
    if training_form != "multi_vector":
        losses = losses + weight * self_contrastive_regulariser(similarities, problem.positives, reduced)
    return losses.mean()


@pytest.mark.parametrize("training_form", SEVERAL)
@pytest.mark.parametrize("reduced", [0, -1])
def test_the_losses_are_the_papers_equations_and_their_gradients_the_derivatives(training_form, reduced):
    """So neither the order of documents and of other layers nor absent vectors matter."""
    for seed in range(5):
        problem = Problem(seed, all_present=reduced == -1)
        documents = [vectors[there] for vectors, there in zip(problem.d, problem.present, strict=True)]
        for temperature in (0.5, 1.0, 3.0):
            expected = literal_loss(problem.q, documents, problem.mask, training_form, reduced, 0.7, temperature)
            found = problem_loss(problem, training_form, reduced, 0.7, temperature)
            assert found.item() == pytest.approx(expected, rel=1e-12)
    inputs = problem.q.requires_grad_(), problem.d.requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: problem_loss(problem, training_form, reduced), inputs)


def test_of_equal_vectors_the_reduced_one_wins_and_has_the_whole_gradient():
    similarities = torch.tensor([[[2.0, 1.0, 2.0], [0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-1.0, -torch.inf, -2.0]]])
    assert best_vector(similarities, -1).tolist() == [[2, 2, 2, 0]]
    assert best_vector(similarities, 0).tolist() == [[0, 1, 0, 0]]
    for reduced, winners in ((-1, [2, 2, 2, 0]), (0, [0, 1, 0, 0])):
        leaf = similarities.clone().requires_grad_()
        found = max_similarity(leaf, reduced)
        assert found.tolist() == [[2.0, 3.0, 1.0, -1.0]]
        found.sum().backward()
        assert leaf.grad[0].tolist() == torch.eye(3)[winners].tolist()


def test_similarities_are_float32_under_autocast():
    problem = Problem(2)
    q, d = problem.q.float(), problem.d.float()
    expected = vector_similarities(q, d, problem.present)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vector_similarities(q, d, problem.present), expected)
        assert vector_similarities(q.bfloat16(), d.bfloat16(), problem.present).dtype == torch.float32


@torch.no_grad()
def encoded_alone(objective, rows) -> tuple[Tensor, list[Tensor]]:
    """Queries, and the vectors of each column's document, every text in a pass of its own."""
    texts = rows["document"].to_pylist() + [text for pool in rows["hard_negatives"].to_pylist() for text in pool]
    queries, documents = objective.query_encoder, objective.document_encoder
    q = torch.cat([queries(queries.tokenize([text], "query")) for text in rows["query"].to_pylist()])
    vectors = []
    for text in texts:
        features = documents.tokenize([text], "document")
        if objective.settings.training_form in SEVERAL:
            states, present = documents.states(features)
            vectors.append(states[present])
        else:
            vectors.append(documents(features))
    return q, vectors


@pytest.mark.parametrize(("form", "training_form"), COMBINATIONS)
def test_a_stored_batch_means_what_its_columns_say_in_chunks_of_any_size(form, training_form):
    rows, gradients = random_batch(5), []
    literal_form = training_form if training_form in SEVERAL else "multi_vector"  # of one vector
    for chunk_size, gradient_cache in ((None, False), (2, False), (2, True), (4, True)):
        objective = tiny_multi_layer(
            FORMS[form], training_form, chunk_size=chunk_size, gradient_cache=gradient_cache, similarity_temperature=0.5
        )
        outcome = objective(objective.collate(rows))
        q, documents = encoded_alone(objective, rows)
        masked = rows["masked"].to_pylist()
        mask = [[column in masked[row] for column in range(len(documents))] for row in range(6)]
        assert len(documents) > 8
        assert sum(map(sum, mask)) > 3
        reduced = -1 if form == "layers" else 0
        expected = literal_loss(q, documents, mask, literal_form, reduced, 0.3, temperature=0.5)
        assert outcome.loss.item() == pytest.approx(expected, rel=1e-10)
        assert outcome.examples == 6
        assert not any(metric.requires_grad for metric in outcome.metrics.values())
        outcome.loss.backward()
        gradients.append(gradients_of(objective))
        assert_same(gradients[-1], gradients[0], 1e-12)
    assert {name.split(".")[0] for name in gradients[0]} == {"query_encoder", "document_encoder"}
    assert ("document_encoder.alpha" in gradients[0]) == (training_form == "scalar_mix")


@pytest.mark.parametrize("form", FORMS)
def test_metrics_are_of_what_is_searched(form):
    rows, reduced = random_batch(11), -1 if form == "layers" else 0
    for training_form in SEVERAL:
        objective = tiny_multi_layer(FORMS[form], training_form)
        metrics = {name: value.item() for name, value in objective(objective.collate(rows)).metrics.items()}
        q, documents = encoded_alone(objective, rows)
        masked, ranks, won = rows["masked"].to_pylist(), [], []
        for i, query in enumerate(q):
            scores = [[float(query @ h) for h in vectors] for vectors in documents]
            seen = [max(of) if training_form == "multi_vector" else of[reduced] for of in scores]
            rivals = [seen[j] for j in range(len(seen)) if j != i and j not in masked[i]]
            ranks.append(1 + sum(score >= seen[i] for score in rivals))
            won.append(int(np.argmax(scores[i])))
        assert metrics["positive_rank"] == pytest.approx(np.mean(ranks))
        assert metrics["accuracy"] == pytest.approx(np.mean(np.array(ranks) == 1))
        shares = {name: value for name, value in metrics.items() if name.startswith("won_by")}
        if form == "layers":
            expected = {"won_by_layer_1": won.count(0) / 6, "won_by_layer_2": won.count(1) / 6}
        else:
            expected = {"won_by_first_token": won.count(0) / 6}
        assert shares == pytest.approx(expected)


ENCODERS = {
    "dual encoder": ({}, {"training_form": "dual_encoder"}),
    "self-contrastive": ({**LAYERS, "reduction": "last"}, {"training_form": "self_contrastive", "regularisation": 1.0}),
    "multi-vector": ({**LAYERS, "reduction": "none"}, {"training_form": "multi_vector"}),
    "average": ({**LAYERS, "reduction": "average"}, {"training_form": "average"}),
    "scalar mix": ({**LAYERS, "reduction": "scalar_mix"}, {"training_form": "scalar_mix"}),
    "ME-BERT": ({"kind": "first_tokens", "tokens": 8, "reduction": "none"}, {"training_form": "multi_vector"}),
    "ColBERT": (
        {"kind": "all_tokens", "reduction": "last"},
        {"training_form": "self_contrastive", "regularisation": 0.01},
    ),
}


def built(path, form, settings, two_towers: bool) -> MultiLayer:
    def load(vector_form):
        wanted = EncoderSettings(model=str(path), form=vector_form, pooling="cls", normalize=False)
        return load_towers(wanted, path, "f" * 64, dropout=0.0)

    towers = load(VectorForm(**form))
    query = load(None).query if two_towers else towers.query
    return MultiLayer(query, towers.document, MultiLayerSettings(**settings, chunk_size=3, gradient_cache=True))


@pytest.mark.parametrize("two_towers", [False, True], ids=["shared", "two towers"])
@pytest.mark.parametrize("case", ENCODERS)
def test_trained_and_exported(case, two_towers, tiny_encoder, tmp_path):
    form, settings = ENCODERS[case]
    trained = built(tiny_encoder, form, settings, two_towers)
    outcomes = learn(trained, [trained.collate(rows_of(4))] * 8, 5e-3)
    assert outcomes[-1].loss < outcomes[0].loss - 0.1
    trained.eval()
    trained.export(tmp_path / "model")
    loaded = load_towers(EncoderSettings(model=str(tmp_path / "model")), tmp_path / "model", "f" * 64).eval()
    for role in ("query", "document"):
        texts = rows_of(4)[role].to_pylist()
        with torch.no_grad():
            found, expected = (
                encoder(encoder.tokenize(texts, role)) for encoder in (loaded.of(role), trained.encoder(role))
            )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
