"""CODER's objective against its equation, by inner products and by a module that scores lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.trainers.candidate_batches import candidate_batch, document_values, store_vectors, tiny_coder
from tests.unit.trainers.tiny import assert_same, weights_of, with_columns
from trainers.objectives.coder.losses import (
    info_nce_loss,
    list_metrics,
    list_net_loss,
    masked_log_softmax,
    max_margin_loss,
)
from trainers.objectives.coder.objective import list_similarities

TRANSFORMER = {"kind": "transformer", "layers": 1, "heads": 2, "dropout": 0.0}

each_scoring = pytest.mark.parametrize("by_module", [False, True], ids=["inner products", "module"])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return store_vectors(tmp_path_factory.mktemp("documents"))


def coder(stored, by_module, **settings):
    """In float64; a module adds something to the inner products."""
    if not by_module:
        return tiny_coder(stored, **settings)
    objective = tiny_coder(stored, scoring=TRANSFORMER | settings.pop("scoring", {}), **settings).double()
    with torch.no_grad():
        out = objective.list_scorer.out
        out += torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return objective


def loss_of(objective, rows):
    return objective(objective.collate(rows)).loss


def expected_loss(objective, rows, temperature=1.0, cosine=False, level=1.0):
    """Eq. 3 of each query that has a label, written out."""
    documents, losses = document_values().astype(np.float64), []
    encoder = objective.encoder("query")
    for row in rows.to_pylist():
        query = encoder(encoder.tokenize([row["query"]], "query")).detach()
        found = documents[row["candidate_rows"]]
        if objective.list_scorer is None:
            scores = found @ query[0].numpy()
        else:
            padded = torch.cat([torch.from_numpy(found), torch.zeros(1, 6)])
            scores = objective.list_scorer(query, padded, torch.arange(len(found))[None])[0].detach().numpy()
        if cosine:
            scores = scores / (np.linalg.norm(query[0]) * np.linalg.norm(found, axis=1))
        log_p = scores / temperature - np.log(np.exp(scores / temperature).sum())
        grades = np.array([-np.inf if g is None or g < level else g for g in row["candidate_relevance"]])
        if np.isfinite(grades).any():
            target = np.exp(grades) / np.exp(grades).sum()
            losses.append(sum(t * (np.log(t) - p) for t, p in zip(target, log_p, strict=True) if t))
    return np.mean(losses)


@each_scoring
@pytest.mark.parametrize("cut", [{}, {"chunk_size": 2, "gradient_cache": True}], ids=str)
def test_a_batch_is_the_papers_loss(stored, by_module, cut):
    rows = candidate_batch(5)
    keys = {"temperature": "temperature", "relevance_level": "level"}
    cases = [{}, {"temperature": 0.2}, {"relevance_level": 2.0}]
    for settings in cases if by_module else [*cases, {"similarity": "cosine"}]:
        objective = coder(stored, by_module, **settings, **cut)
        outcome = objective(objective.collate(rows))
        wanted = {keys[name]: value for name, value in settings.items() if name in keys}
        found = expected_loss(objective, rows, cosine="similarity" in settings, **wanted)
        assert outcome.loss.item() == pytest.approx(found, rel=1e-10)
        assert outcome.metrics["unlabelled"] == 0.25
        assert outcome.examples == 4
        assert not any(metric.requires_grad for metric in outcome.metrics.values())
        if by_module:
            assert abs(loss_of(tiny_coder(stored, **settings), rows) - outcome.loss) > 1e-3


def test_an_untrained_module_changes_no_loss(stored):
    rows = candidate_batch(5)
    plain, scored = tiny_coder(stored), tiny_coder(stored, scoring=TRANSFORMER).double()
    assert plain.list_scorer is None
    assert loss_of(plain, rows).item() == pytest.approx(loss_of(scored, rows).item(), rel=1e-12)
    one, again, other = (weights_of(tiny_coder(stored, scoring=TRANSFORMER, seed=seed)) for seed in (1, 1, 2))
    assert_same(one, again)
    assert any((other[name] != value).any() for name, value in one.items())


@each_scoring
def test_queries_are_apart_and_those_without_a_label_teach_nothing(stored, by_module):
    objective, rows = coder(stored, by_module), candidate_batch(2, size=6, longest=20)
    alone = [loss_of(objective, rows.slice(place, 1)) for place in range(6)]
    assert alone[2] == 0  # has no label
    alone[2].backward()
    assert all(not parameter.grad.any() for parameter in objective.parameters())
    whole = loss_of(objective, rows)
    assert whole.item() == pytest.approx(sum(alone).item() / 5, rel=1e-12)
    whole.backward()
    assert all(parameter.grad.any() for parameter in objective.parameters() if parameter.ndim > 1)


@each_scoring
@pytest.mark.parametrize("loss", ["list_net", "info_nce", "max_margin"])
def test_lists_of_none_and_of_one_candidate(stored, by_module, loss):
    rows = candidate_batch(2, size=2).to_pylist()
    rows[0] |= {"candidate_rows": [], "candidate_relevance": []}
    rows[1] |= {"candidate_rows": [4], "candidate_relevance": [1]}
    table = candidate_batch(2).schema.empty_table().from_pylist(rows, schema=candidate_batch(2).schema)
    objective = coder(stored, by_module, loss=loss)
    outcome = objective(objective.collate(table))
    outcome.loss.backward()
    assert outcome.loss.item() == pytest.approx(0, abs=1e-12)
    assert outcome.metrics["unlabelled"] == 0.5
    assert all(parameter.grad.isfinite().all() for parameter in objective.parameters())
    assert loss_of(objective, table.slice(0, 1)).item() == 0


def test_a_frozen_query_encoder_stays_as_it_is(stored):
    objective = coder(stored, by_module=True, scoring={"query_encoder": "frozen", "dropout": 0.5}).train()
    assert not objective.query_encoder.training
    assert objective.list_scorer.training
    trained = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("list_scorer" in name for name in trained)
    loss_of(objective, candidate_batch(2)).backward()
    assert all(parameter.grad is None for parameter in objective.query_encoder.parameters())
    assert objective.list_scorer.out.grad.any()


def test_the_released_divisor_of_max_margin_depends_on_the_padding(stored):
    rows = candidate_batch(5, longest=30)

    def loss(table, **settings):
        objective = tiny_coder(stored, loss="max_margin", **settings)
        batch = objective.collate(table)
        return objective(batch).loss.item(), objective(replace(batch, labels=batch.labels + 1)).loss.item()

    short = int(np.argmin([len(row["candidate_rows"]) for row in rows.to_pylist()]))
    alone, beside = loss(rows.slice(short, 1)), loss(rows)
    assert alone[0] == alone[1] > 0  # grades don't matter, labels do
    assert len(set(loss(rows, relevance_level=0))) == 1
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


@pytest.mark.parametrize("loss", [list_net_loss, info_nce_loss, max_margin_loss])
def test_padding_counts_for_nothing_whatever_it_holds(loss):
    inf, lengths = float("inf"), (5, 3, 2)
    present = torch.arange(5) < torch.tensor(lengths)[:, None]
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    scores[1, 1] = 9  # has no label
    labels = torch.tensor([[-inf, 2, 1, -inf, 0], [1, -inf, 3, 9, 9], [-inf, -inf, 9, 9, 9]])
    alone = [loss(*(each[row : row + 1, :n] for each in (scores, labels, present))) for row, n in enumerate(lengths)]
    assert alone[2] == 0 < alone[0]
    scores[~present] = inf
    torch.testing.assert_close(loss(scores, labels, present), torch.cat(alone))
    assert masked_log_softmax(scores, present & False).isneginf().all()
    assert list_metrics(scores, labels, present) == list_metrics(scores, labels.where(present, -inf), present)


def test_similarities_of_places():
    queries, documents = torch.randn(2, 3), torch.cat([torch.randn(4, 3), torch.zeros(1, 3)])
    places = torch.tensor([[0, 3, 4], [2, 2, 1]])
    found = list_similarities(queries, documents.half(), places, "inner_product")
    torch.testing.assert_close(found, torch.einsum("bd,bnd->bn", queries, documents.half().float()[places]))
    cosine = list_similarities(queries, documents, places, "cosine")
    expected = torch.nn.functional.cosine_similarity(queries[:, None], documents[places], dim=-1)
    torch.testing.assert_close(cosine, expected)
    assert cosine[0, 2] == 0


def test_epochs_draw_anew(stored):
    objective, rows = tiny_coder(stored, negatives="corpus", candidates=12), candidate_batch(1)
    first, second = (objective.collate(with_columns(rows, epoch=[epoch] * 4)) for epoch in (0, 1))
    assert first.places.shape == (4, 12)
    assert not torch.equal(first.documents[first.places], second.documents[second.places])


def test_what_queries_are_compared_with(stored):
    rows = candidate_batch(5)
    lengths = [len(row["candidate_rows"]) for row in rows.to_pylist()]
    for level in (1, 2):
        positives = [sum((g or 0) >= level for g in row["candidate_relevance"]) for row in rows.to_pylist()]
        found = tiny_coder(stored, relevance_level=level).comparisons(rows)
        assert (found.queries, found.positives, found.in_batch) == (4, np.mean(positives), 0)
        assert found.hard == pytest.approx(np.mean(lengths) - np.mean(positives))
        few = tiny_coder(stored, relevance_level=level, candidates=2).comparisons(rows)
        assert few.hard == pytest.approx(np.mean([max(0, 2 - count) for count in positives]))
    assert tiny_coder(stored, negatives="in_batch").comparisons(rows).in_batch > 0
    some = tiny_coder(stored, negatives="in_batch", candidates=5, retrieved_negatives=1).comparisons(rows)
    assert 0 < some.hard <= 1
    assert some.in_batch > 0
