from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.unit.trainers.candidate_batches import candidate_batch, document_values, store_vectors, tiny_coder
from tests.unit.trainers.tiny import Reports, tiny_settings
from trainers.engine.loop import train
from trainers.engine.order import Piece
from trainers.engine.reading import Reader
from trainers.engine.settings import OptimizerSettings
from trainers.objectives.coder.losses import list_metrics
from trainers.objectives.coder.objective import list_similarities
from trainers.objectives.coder.settings import CoderSettings


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return store_vectors(tmp_path_factory.mktemp("documents"))


def expected_loss(objective, rows, temperature=1.0, cosine=False, level=1.0):
    """Eq. 3 of each query that has a label, written out."""
    documents, losses = document_values().astype(np.float64), []
    encoder = objective.encoder("query")
    for row in rows.to_pylist():
        query = encoder(encoder.tokenize([row["query"]], "query"))[0].detach().numpy()
        found = documents[row["candidate_rows"]]
        if cosine:
            query, found = query / np.linalg.norm(query), found / np.linalg.norm(found, axis=1, keepdims=True)
        scores = found @ query / temperature
        log_p = scores - np.log(np.exp(scores).sum())
        grades = np.array([-np.inf if g is None or g < level else g for g in row["candidate_relevance"]])
        if np.isfinite(grades).any():
            target = np.exp(grades) / np.exp(grades).sum()
            losses.append(sum(t * (np.log(t) - p) for t, p in zip(target, log_p, strict=True) if t))
    return np.mean(losses)


@pytest.mark.parametrize("cut", [{}, {"chunk_size": 2, "gradient_cache": True}], ids=str)
def test_a_batch_is_the_papers_loss(stored, cut):
    rows = candidate_batch(5)
    for settings in ({}, {"temperature": 0.2}, {"similarity": "cosine"}, {"relevance_level": 2.0}):
        objective = tiny_coder(stored, **settings, **cut)
        outcome = objective(objective.collate(rows))
        keys = {"temperature": "temperature", "relevance_level": "level"}
        wanted = {keys[name]: value for name, value in settings.items() if name in keys}
        found = expected_loss(objective, rows, cosine="similarity" in settings, **wanted)
        assert outcome.loss.item() == pytest.approx(found, rel=1e-10)
        assert outcome.metrics["unlabelled"] == 0.25
        assert outcome.examples == 4
        assert not any(metric.requires_grad for metric in outcome.metrics.values())


def test_a_query_does_not_depend_on_those_beside_it(stored):
    objective, rows = tiny_coder(stored), candidate_batch(2, size=6, longest=20)
    whole = objective(objective.collate(rows)).loss.item()
    alone = [objective(objective.collate(rows.slice(place, 1))).loss.item() for place in range(6)]
    assert alone[2] == 0  # has no label
    assert whole == pytest.approx(sum(alone) / 5, rel=1e-12)


def test_only_the_query_encoder_gets_a_gradient_and_unlabelled_queries_none(stored):
    objective, rows = tiny_coder(stored), candidate_batch(2)
    objective(objective.collate(rows.slice(2, 1))).loss.backward()
    assert all(not parameter.grad.any() for parameter in objective.parameters())
    objective(objective.collate(rows)).loss.backward()
    assert all(parameter.grad.any() for parameter in objective.query_encoder.parameters() if parameter.ndim > 1)


def test_lists_of_none_and_of_one_candidate(stored):
    rows = candidate_batch(2, size=2).to_pylist()
    rows[0] |= {"candidate_rows": [], "candidate_relevance": []}
    rows[1] |= {"candidate_rows": [4], "candidate_relevance": [1]}
    table = candidate_batch(2).schema.empty_table().from_pylist(rows, schema=candidate_batch(2).schema)
    for loss in ("list_net", "info_nce", "max_margin"):
        objective = tiny_coder(stored, loss=loss)
        outcome = objective(objective.collate(table))
        assert outcome.loss.item() == pytest.approx(0, abs=1e-12)
        assert outcome.metrics["unlabelled"] == 0.5
        assert objective(objective.collate(table.slice(0, 1))).loss.item() == 0


def test_temperature_is_a_divisor(stored):
    rows, objective = candidate_batch(5), tiny_coder(stored, temperature=0.3)
    expected = expected_loss(objective, rows, temperature=0.3)
    assert objective(objective.collate(rows)).loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_released_divisor_of_max_margin_depends_on_the_padding(stored):
    rows = candidate_batch(5, longest=30)

    def loss(table, **settings):
        objective = tiny_coder(stored, loss="max_margin", **settings)
        batch = objective.collate(table)
        return objective(batch).loss.item(), objective(replace(batch, labels=batch.labels * 2)).loss.item()

    short = int(np.argmin([len(row["candidate_rows"]) for row in rows.to_pylist()]))
    alone, beside = loss(rows.slice(short, 1)), loss(rows)
    assert alone[0] == alone[1] > 0  # grades don't matter, labels do
    assert loss(rows.slice(short, 1), margin_divisor="padded_width") == pytest.approx(alone)
    assert loss(rows, margin_divisor="padded_width")[0] < beside[0]


def test_metrics_rank_the_best_labelled_behind_its_equals():
    inf = float("inf")
    similarities = torch.tensor([[3.0, 2.0, 2.0, 1.0], [0.5, 0.25, 0.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    labels = torch.tensor([[-inf, 1.0, -inf, 3.0], [2.0, 1.0, -inf, -inf], [-inf] * 4])
    present = torch.tensor([[True] * 4, [True, True, True, False], [True] * 4])
    found = {name: value.item() for name, value in list_metrics(similarities, labels, present).items()}
    assert found == pytest.approx(
        {"reciprocal_rank": (1 / 3 + 1) / 2, "positive_rank": 2.0, "unlabelled": 1 / 3, "list_length": 11 / 3}
    )


def test_similarities_of_places():
    queries, documents = torch.randn(2, 3), torch.cat([torch.randn(4, 3), torch.zeros(1, 3)])
    places = torch.tensor([[0, 3, 4], [2, 2, 1]])
    found = list_similarities(queries, documents.half(), places, "inner_product")
    torch.testing.assert_close(found, torch.einsum("bd,bnd->bn", queries, documents.half().float()[places]))
    cosine = list_similarities(queries, documents, places, "cosine")
    expected = torch.nn.functional.cosine_similarity(queries[:, None], documents[places], dim=-1)
    torch.testing.assert_close(cosine, expected)
    assert cosine[0, 2] == 0


class Batches:
    uri, fingerprint = "made up", "f" * 64

    def number_of_batches(self, epoch):  # noqa: ARG002
        return 4

    def read(self, epoch, index):  # noqa: ARG002
        return candidate_batch(index).drop_columns(["epoch"])

    def stored_bytes(self, epoch, index):  # noqa: ARG002
        return 1


def test_the_loop_trains_it_and_epochs_draw_anew(stored):
    objective = tiny_coder(stored, negatives="corpus", candidates=12)
    reader = Reader(Batches(), objective)
    first, second = (objective.collate(reader.read_piece(epoch, Piece((1,)))) for epoch in (0, 1))
    assert first.places.shape == (4, 12)
    assert not torch.equal(first.documents[first.places], second.documents[second.places])
    objective = tiny_coder(stored, temperature=0.2)
    losses = []
    settings = tiny_settings(epochs=6, optimizer=OptimizerSettings(learning_rate=0.02))
    train(objective, Batches(), settings, callbacks=[Reports(on_step=lambda point: losses.append(point["loss"]))])
    assert np.mean(losses[-2:]) < 0.7 * np.mean(losses[:2])


def test_what_queries_are_compared_with(stored):
    rows = candidate_batch(5)
    lengths = [len(row["candidate_rows"]) for row in rows.to_pylist()]
    positives = [sum((g or 0) >= 1 for g in row["candidate_relevance"]) for row in rows.to_pylist()]
    found = tiny_coder(stored).comparisons(rows)
    assert (found.queries, found.positives, found.in_batch) == (4, np.mean(positives), 0)
    assert found.hard == pytest.approx(np.mean(lengths) - np.mean(positives))
    assert tiny_coder(stored, negatives="in_batch").comparisons(rows).in_batch > 0
    some = tiny_coder(stored, negatives="in_batch", candidates=5, retrieved_negatives=1).comparisons(rows)
    assert 0 < some.hard <= 1
    assert some.in_batch > 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss": "info_nce", "binary_labels": True}, "shape the target of list_net, not info_nce"),
        ({"margin_divisor": "padded_width"}, "belongs to the loss max_margin"),
        ({"temperature": 0}, "temperature"),
        ({"retrieved_negatives": 5, "candidates": 10}, "beside negatives that are drawn, but negatives is 'retrieved'"),
        ({"retrieved_negatives": 5, "negatives": "corpus"}, "some of a list's 'candidates': say how many"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, match):
    with pytest.raises(ValidationError, match=match):
        CoderSettings(documents="vectors", **settings)
