"""The contextual objective: what is drawn as context, who reads what of it, exact in chunks, trained and exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.objectives.contextual.made_up import FUNCTIONS, objective_of, rows_of
from tests.unit.trainers.tiny import gradients_of, learn
from trainers.objective import Outcome, build_objective
from trainers.objectives.contextual import Contextual, contextual_encoder
from trainers.objectives.contrastive import Contrastive, masked_contrastive_loss
from trainers.objectives.pair_settings import ContextualSettings, ContrastiveSettings

pytestmark = pytest.mark.usefixtures("one_thread")
CACHED = {"gradient_cache": True}


def step(objective: Contextual, rows: Any = None) -> tuple[Outcome, dict[str, np.ndarray]]:
    objective.zero_grad()
    outcome = objective(objective.collate(rows_of() if rows is None else rows))
    outcome.loss.backward()
    return outcome, gradients_of(objective)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=tolerance, atol=tolerance * scale, err_msg=name)


CASES: dict[str, dict[str, Any]] = {
    "paper": {"own_documents_in_context": True, "sequence_dropout": 0.2},
    "default": {"sequence_dropout": 0.2, "context_documents": 6},
    "released": {"variant": "released", "sequence_dropout": 0.2, "vectors_per_document": 2},
    "blocks": {"prefix_attends": "prefix", "sequence_dropout": 0.2},
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_any_size_give_the_same(case: str, tiny_encoder: Path) -> None:
    whole = objective_of(tiny_encoder, **CASES[case]).double()
    outcome, expected = step(whole)
    assert any(name.startswith("query_encoder.first_stage.transformer.encoder") for name in expected)
    assert "query_encoder.null" in expected
    for chunk_size in (1, 3, 50):
        chunked = objective_of(tiny_encoder, chunk_size=chunk_size, **CACHED, **CASES[case]).double()
        found, gradients = step(chunked)
        assert found.loss.item() == pytest.approx(outcome.loss.item(), rel=1e-12)
        same(gradients, expected)


class Spy:
    """Notes what the encoder's ``encode`` is given, text by text."""

    def __init__(self, objective: Contextual, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: dict[tuple[int, ...], Tensor] = {}
        self.dropped: list[Tensor] = []
        original = objective.contextual.encode

        def encode(features, prefix, dropped=None, hidden=None):
            for place, ids in enumerate(features["input_ids"].tolist()):
                if hidden is not None:
                    self.hidden[tuple(token for token in ids if token)] = hidden[place]
            if dropped is not None:
                self.dropped.append(dropped)
            return original(features, prefix, dropped, hidden)

        monkeypatch.setattr(objective.contextual, "encode", encode)


def test_no_text_reads_its_own_document(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(tiny_encoder, sequence_dropout=0.0)
    spy = Spy(objective, monkeypatch)
    batch = objective.collate(rows_of())
    objective(batch)
    documents = batch.candidates.features["input_ids"].tolist()
    context = [tuple(token for token in ids if token) for ids in documents]
    assert len(context) == 7 + 5  # distinct documents and hard negatives; J is 64
    for query, document in FUNCTIONS:
        answers = {d for q, d in FUNCTIONS if q == query}
        ids = objective.contextual.tokenize_ids([*answers], "document")
        encoded = dict(zip(answers, map(tuple, ids), strict=True))
        of_document = spy.hidden[encoded[document]]
        assert [context[place] for place in of_document.nonzero()[:, 0]] == [encoded[document]]
        of_query = spy.hidden[tuple(objective.contextual.tokenize_ids([query], "query")[0])]
        assert {context[place] for place in of_query.nonzero()[:, 0]} == {encoded[text] for text in answers}
    outcome, _ = step(objective)
    assert outcome.metrics["answers_in_context"] == 1


def test_hidden_is_as_if_it_were_not_drawn(tiny_encoder: Path) -> None:
    """The loss, taken apart: each text with a context of all other documents."""
    objective = objective_of(tiny_encoder, sequence_dropout=0.0).double()
    rows = rows_of(4)
    found = objective(objective.collate(rows)).loss
    queries, documents = rows["query"].to_pylist(), rows["document"].to_pylist()
    others = [text for texts in rows["hard_negatives"].to_pylist() for text in texts]
    encoder = objective.contextual

    def read(text: str, role: str, own: str) -> Tensor:
        context = encoder.embed_context([each for each in documents + others if each != own])
        vectors = encoder.encode(encoder.tokenize([text], role), encoder.read_context(context))
        return torch.nn.functional.normalize(vectors, dim=-1)

    with torch.no_grad():
        q = torch.cat([read(query, "query", document) for query, document in zip(queries, documents, strict=True)])
        d = torch.cat([read(document, "document", document) for document in documents + others])
    expected = masked_contrastive_loss(q, d, torch.zeros(4, len(d)).bool(), torch.arange(4), 0.02)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_papers_way_reads_all(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(tiny_encoder, own_documents_in_context=True, sequence_dropout=0.4)
    spy = Spy(objective, monkeypatch)
    objective(objective.collate(rows_of()))
    assert not spy.hidden
    assert 0.2 < torch.cat(spy.dropped).float().mean() < 0.6
    spy.dropped.clear()
    objective.eval()
    objective(objective.collate(rows_of()))
    assert not spy.dropped  # in evaluation nothing is dropped


def test_contexts_change_with_epoch_and_seed(tiny_encoder: Path) -> None:
    drawn = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        objective = objective_of(tiny_encoder, context_documents=4, seed=seed)
        keys = objective.collate(rows_of(epoch=epoch)).candidates.keys.tolist()
        assert len(set(keys)) == 4
        drawn.setdefault((seed, epoch), frozenset(keys))
        assert drawn[seed, epoch] == frozenset(keys)
    assert len(set(drawn.values())) == 3


def test_empty_documents_are_no_context(tiny_encoder: Path) -> None:
    rows = rows_of(2)
    emptied = rows.set_column(1, "document", [["", " "]]).set_column(2, "hard_negatives", [[["pass"], [""]]])
    objective = objective_of(tiny_encoder)
    assert len(objective.collate(emptied).candidates.keys) == 1
    without = emptied.set_column(2, "hard_negatives", [[[""], [""]]])
    outcome, gradients = step(objective, without)  # no context at all
    assert outcome.loss.isfinite()
    assert not any("first_stage" in name for name in gradients)


def test_an_encoder_of_one_stage_is_another_objective(tiny_encoder: Path) -> None:
    """Without context it is the plain contrastive objective; and the contextual one wants two stages."""
    settings = EncoderSettings(model=str(tiny_encoder), pooling="mean", normalize=True)
    towers = load_towers(settings, tiny_encoder, "f" * 64, dropout=0.0)
    plain = Contrastive(towers.query, ContrastiveSettings(similarity_temperature=0.02))
    hidden = objective_of(tiny_encoder, context_documents=1, sequence_dropout=0.0)
    empty = rows_of(2).set_column(1, "document", [["", " "]]).set_column(2, "hard_negatives", [[[""], [""]]])
    expected = plain(plain.collate(empty)).loss
    assert hidden(hidden.collate(empty)).loss.item() == pytest.approx(expected.item(), abs=1e-5)
    with pytest.raises(UserError, match="trains an encoder of two stages"):
        build_objective(ContextualSettings(), towers)


def test_trained_exported_and_trained_on(tiny_encoder: Path, tmp_path: Path) -> None:
    trained = objective_of(tiny_encoder, chunk_size=4, **CACHED, context_documents=6, similarity_temperature=0.1)
    outcomes = learn(trained, (trained.collate(rows_of(epoch=epoch)) for epoch in range(8)), 3e-3)
    assert outcomes[-1].loss < outcomes[0].loss - 0.1
    trained.eval()
    documents = [document for _, document in FUNCTIONS]
    trained.read_corpus(documents)
    expected = encode_texts(trained.encoder("query"), documents, "query")
    trained.export(tmp_path / "model")
    assert trained.encoder("document").contract.context is None
    towers = load_towers(EncoderSettings(model=str(tmp_path / "model")), tmp_path / "model", "e" * 64).eval()
    assert isinstance(towers.query, ContextualEncoder)
    towers.query.use_context(towers.query.embed_context(documents))
    np.testing.assert_allclose(encode_texts(towers.query, documents, "query"), expected, atol=1e-5, rtol=0)

    again = ContextualSettings(context_documents=3, context_max_length=9)
    encoder = contextual_encoder(towers.query, again, None, seed=0)
    assert (encoder.contextual_form.context_documents, encoder.contract.architecture) == (3, "contextual, 3 vectors")
    assert encoder.first_stage.contract.max_length == 9
    assert isinstance(build_objective(again, towers), Contextual)
    for other in ({"variant": "released"}, {"vectors_per_document": 2}, {"first_stage_layers": 1}):
        with pytest.raises(UserError, match=r"contextual already .* keeps both its stages"):
            contextual_encoder(towers.query, ContextualSettings(**other), None, seed=0)


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16(case: str, tiny_encoder: Path) -> None:
    """Under autocast the loss is the same up to rounding, and every weight still gets its gradient."""
    objective = objective_of(tiny_encoder, chunk_size=3, similarity_temperature=1.0, **CACHED, **CASES[case])
    expected, gradients = step(objective)
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        found = objective(objective.collate(rows_of()))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
    assert gradients_of(objective).keys() == gradients.keys()
