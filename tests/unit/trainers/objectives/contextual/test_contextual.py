"""The contextual objective: what is drawn as context, who reads what of it; its runs from their settings, exported.

That chunks of any size change nothing is what tests/distributed/test_contextual.py compares.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.embedding import encode_texts
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.pretrained import locate_models
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.objectives.contextual.made_up import FUNCTIONS, objective_of, rows_of
from tests.unit.trainers.tiny import gradients_of, learn, with_columns
from tests.unit.trainers.validation.made_up import DOCUMENTS, write_source
from tests.unit.trainers.validation.made_up import collect as collect_source
from trainers.engine.draws import text_keys
from trainers.objective import Outcome, build_objective
from trainers.objectives.contextual import Contextual, contextual_encoder, drawn_places, dropped_places
from trainers.objectives.contrastive import Contrastive, masked_contrastive_loss
from trainers.objectives.pair_settings import ContextualSettings, ContrastiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings


def step(objective: Contextual, rows: Any = None) -> tuple[Outcome, dict[str, np.ndarray]]:
    objective.zero_grad()
    outcome = objective(objective.collate(rows_of() if rows is None else rows))
    outcome.loss.backward()
    return outcome, gradients_of(objective)


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
    assert len(outcome.metrics) > 1
    assert outcome.tokens == batch.tokens + batch.candidates.tokens > batch.tokens


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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_null_vector_is_trained_where_something_reads_it(tiny_encoder: Path, dropout: float) -> None:
    """A gradient of zeros would still let weight decay shrink it."""
    _, gradients = step(objective_of(tiny_encoder, sequence_dropout=dropout, context_documents=4))
    assert ("query_encoder.null" in gradients) == (dropout > 0)


def test_contexts_change_with_epoch_and_seed(tiny_encoder: Path) -> None:
    drawn = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        objective = objective_of(tiny_encoder, context_documents=4, seed=seed)
        keys = objective.collate(rows_of(epoch=epoch)).candidates.keys.tolist()
        assert len(set(keys)) == 4
        drawn.setdefault((seed, epoch), frozenset(keys))
        assert drawn[seed, epoch] == frozenset(keys)
    assert len(set(drawn.values())) == 3


def test_without_documents_to_read_it_is_the_plain_contrastive_objective(tiny_encoder: Path) -> None:
    """Empty documents are no context; and the contextual objective wants two stages."""
    rows = rows_of(2)
    emptied = with_columns(rows, document=["", " "], hard_negatives=[["pass"], [""]])
    assert len(objective_of(tiny_encoder).collate(emptied).candidates.keys) == 1
    nothing = with_columns(rows, document=["", " "], hard_negatives=[[""], [""]])
    outcome, gradients = step(objective_of(tiny_encoder, sequence_dropout=0.0), nothing)
    assert outcome.tokens == objective_of(tiny_encoder).collate(nothing).tokens
    assert not any("first_stage" in name for name in gradients)
    settings = EncoderSettings(model=str(tiny_encoder), pooling="mean", normalize=True)
    towers = load_towers(settings, tiny_encoder, "f" * 64, dropout=0.0)
    plain = Contrastive(towers.query, ContrastiveSettings(similarity_temperature=0.02))
    expected = plain(plain.collate(nothing)).loss
    assert outcome.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    with pytest.raises(UserError, match="trains an encoder of two stages"):
        build_objective(ContextualSettings(), towers)


def test_trained_exported_and_trained_on(tiny_encoder: Path, tmp_path: Path) -> None:
    trained = objective_of(
        tiny_encoder, chunk_size=4, gradient_cache=True, context_documents=6, similarity_temperature=0.1
    )
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


TEXTS = [f"text {number}" for number in range(200)]


def test_keys_are_of_the_text_and_the_salt() -> None:
    keys = text_keys(TEXTS)
    assert keys.dtype == torch.int64
    assert len(set(keys.tolist())) == len(TEXTS)
    assert torch.equal(text_keys(TEXTS[5:9]), keys[5:9])
    assert not set(text_keys(TEXTS, salt="1 ").tolist()) & set(keys.tolist())
    assert (keys > 0).float().mean() == pytest.approx(0.5, abs=0.15)
    assert text_keys([]).shape == (0,)


def test_a_draw_is_without_replacement_and_of_every_text_alike() -> None:
    assert drawn_places(torch.tensor([5, -3, 5, 9, -3, 1]), 3).tolist() == [0, 1, 5]
    assert drawn_places(torch.tensor([5, -3, 5]), 64).tolist() == [0, 1]
    assert drawn_places(torch.tensor([], dtype=torch.int64), 4).tolist() == []
    counts = torch.zeros(20)
    for epoch in range(400):
        numbers = text_keys(TEXTS[:20], salt=f"0 {epoch} ")
        counts[drawn_places(numbers, 5)] += 1
    assert counts.sum() == 2000
    assert counts.min() > 60  # 100 expected, a standard deviation is 9
    assert counts.max() < 140

    # what ranks rely on: parts of a draw are the draw of the parts
    numbers = text_keys(TEXTS)
    both = torch.cat([drawn_places(numbers[:90], 10), drawn_places(numbers[90:], 10) + 90])
    assert torch.equal(both[drawn_places(numbers[both], 10)], drawn_places(numbers, 10))


@pytest.mark.parametrize("probability", [0.0, 0.005, 0.3, 0.9])
def test_dropout_has_its_probability(probability: float) -> None:
    texts, slots = text_keys([f"{n}" for n in range(1000)]), text_keys(TEXTS)
    dropped = dropped_places(texts, slots, probability)
    deviation = (probability * (1 - probability) / dropped.numel()) ** 0.5
    assert dropped.float().mean().item() == pytest.approx(probability, abs=5 * deviation + 1e-12)
    for axis, size in ((0, 1000), (1, 200)):
        spread = dropped.float().mean(dim=axis)
        assert (spread - probability).abs().max() <= 6 * (probability * (1 - probability) / size) ** 0.5 + 1e-12
    assert torch.equal(dropped[7:9, 3:5], dropped_places(texts[7:9], slots[3:5], probability))
    neighbours = dropped_places(text_keys([f"{n}" for n in range(20_000)]), slots[:1] + torch.arange(2), 0.5)
    assert torch.corrcoef(neighbours.double().T)[0, 1].abs() < 0.03  # of neighbouring slots it is independent


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("contextual-validation")
    corpus = write_source(folder / "source") / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace('"text"', '"title": "w1", "text"'))
    return collect_source(folder / "source", folder / "collection")


def opened(collection: str, **settings: Any) -> Any:
    chosen = RetrievalValidationSettings(collection=collection, measure="AP", others=[], every=2, **settings)
    return build_validation(chosen, bf16=False, epoch_ends=[10])


def test_validation_reads_documents_of_its_own_corpus_and_follows_the_weights(
    tiny_encoder: Path, collection: str
) -> None:
    objective = objective_of(tiny_encoder, context_documents=20)
    given: list[list[str]] = []
    read_corpus = objective.read_corpus
    objective.read_corpus = lambda documents: (given.append(list(documents)), read_corpus(documents))  # type: ignore
    validation = opened(collection)
    first = validation.measure(objective)
    assert validation.measure(objective) == first
    texts = StoredCollection(collection).texts("documents", np.arange(DOCUMENTS))
    assert len(given[0]) == 20
    assert set(given[0]) <= set(texts)
    assert given[1] == given[0]
    assert opened(collection).measure(objective) == first  # another process draws the same
    opened(collection, seed=1).measure(objective)
    assert given[-1] != given[0]
    opened(collection, with_title=False).measure(objective)
    untitled = StoredCollection(collection).texts("documents", np.arange(DOCUMENTS), with_title=False)
    assert set(given[-1]) <= {*untitled} - {*texts}
    vectors = objective.contextual.context_vectors
    with torch.no_grad():
        for parameter in objective.contextual.first_stage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert opened(collection, seed=1).measure(objective) != first
    assert (objective.contextual.context_vectors - vectors).abs().max() > 0.1
    objective.settings = objective.settings.model_copy(update={"context_documents": 500})
    opened(collection).measure(objective)
    assert len(given[-1]) == DOCUMENTS  # all there are


def settings_of(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "batches": "any",
        "encoder": {"model": str(model), "pooling": "mean", "normalize": True, "dtype": "float32"},
        "objective": {"kind": "contextual", "context_documents": 4, "chunk_size": 3, "gradient_cache": True},
        "training": {"bf16": False, "checkpoint_every": 2, "epochs": 2, "schedule": {"kind": "constant"}},
    } | changes


def test_settings_that_do_not_fit_are_refused(tiny_encoder: Path) -> None:
    model = {"model": str(tiny_encoder)}
    for changes, message in (
        ({"document_encoder": model}, "leave out document_encoder"),
        ({"encoder": model | {"form": {"kind": "layers", "layers": [1, 2]}}}, "and encoder.form"),
        ({"objective": {"kind": "contextual", "variant": "released", "prefix_attends": "prefix"}}, "Set prompts to 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            RunSettings.model_validate(settings_of(tiny_encoder, **changes))


def test_encoders_that_do_not_fit_are_refused_before_training(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "contextual"
    objective_of(tiny_encoder).eval().export(folder)

    def load(encoder: Path, **objective: Any) -> tuple[RunSettings, Any]:
        settings = RunSettings.model_validate(settings_of(encoder, objective=objective))
        return settings, load_for_training(settings, locate_models(settings))

    with pytest.raises(UserError, match="which is a contextual encoder with two stages of its own"):
        load(tiny_encoder, kind="contextual", first_stage={"model": str(folder)})
    behind = r"behind 500 context vectors and 8 prompt vectors.*context_documents in training"
    with pytest.raises(UserError, match=behind):
        load(tiny_encoder, kind="contextual", variant="released", context_documents=500)
    settings, towers = load(folder, kind="contrastive")
    with pytest.raises(UserError, match="contrastive doesn't train contextual encoders"):
        build_objective(settings.objective, towers)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}, {"activation_checkpointing": True}])
def test_both_stages_are_prepared_for_training(changes: dict[str, Any], tiny_encoder: Path) -> None:
    """LoRA, activation checkpointing reach the first stage too, and gradients are those without the latter."""
    objective = {"kind": "contextual", "first_stage": {"model": str(tiny_encoder), "pooling": "cls"}}
    objective |= {"first_stage_layers": 1, "context_max_length": 9}
    settings = RunSettings.model_validate(settings_of(tiny_encoder, objective=objective, dropout=0.0, **changes))
    located = locate_models(settings)
    assert set(located) == {"encoder", "objective.first_stage"}
    towers = load_for_training(settings, located)
    encoder = towers.query
    assert isinstance(encoder, ContextualEncoder)
    assert encoder is towers.document
    assert (encoder.first_stage.contract.pooling, encoder.first_stage.contract.max_length) == ("cls", 9)
    assert encoder.first_stage.transformer.config.num_hidden_layers == 1
    for stage in (encoder.transformer, encoder.first_stage.transformer):
        names = [name for name, parameter in stage.named_parameters() if parameter.requires_grad]
        assert names
        assert all("lora_" in name for name in names) == ("lora" in changes)
    assert encoder._backbone.in_parts == ("activation_checkpointing" not in changes)
    features = encoder.tokenize(["import the file", "return"], "query")
    plain = load_for_training(RunSettings.model_validate(settings_of(tiny_encoder, objective=objective)), located).query
    assert isinstance(plain, ContextualEncoder)
    found = []
    for each in (encoder.train(), plain.eval()):
        context = each.read_documents(each.first_stage.tokenize(["yield", "a file is open"], "document")).flatten(0, 1)
        vectors = each.encode(features, each.read_context(context))
        vectors[:, 0].sum().backward()
        found.append((vectors, each.null.grad, each.first_stage.transformer.embeddings.word_embeddings.weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    if "lora" not in changes:
        torch.testing.assert_close(found[0][2], found[1][2], atol=1e-5, rtol=1e-4)


def test_a_context_that_marks_most_pairs_is_said_before_a_run(tiny_encoder: Path, logged: list[str]) -> None:
    def check(**settings: Any) -> None:
        batches = SimpleNamespace(batch_size=64, uri="b", distinct=lambda _: {"wiki"})
        objective_of(tiny_encoder, **settings).check_batches(batches)

    check(context_documents=32)
    check(context_documents=64, own_documents_in_context=True)
    check(context_documents=64, share_negatives="step")
    assert logged == []
    check(context_documents=33)
    assert "context_documents is 33 with batches of 64" in logged[0]
    assert "context_documents to 16" in logged[0]
    with pytest.raises(UserError, match="prompts_by_domain names 'forum', but no batch in b has"):
        check(prompts_by_domain={"forum": {}})
