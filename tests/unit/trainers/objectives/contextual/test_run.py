"""Contextual runs from their settings: validated in the corpus's own context, resumed, exported; what is refused."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.pretrained import locate_models
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.objectives.contextual.made_up import objective_of
from tests.unit.trainers.tiny import TinyBatches, assert_same, tiny_settings, weights_of
from tests.unit.trainers.validation.made_up import DOCUMENTS, write_source
from tests.unit.trainers.validation.made_up import collect as collect_source
from trainers.engine.callback import Callback
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.objective import build_objective
from trainers.objectives.pair_settings import ContextualSettings
from trainers.record.model_card import model_card
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("contextual-validation")
    return collect_source(write_source(folder / "source"), folder / "collection")


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


def test_the_card_says_what_is_a_fallback(tiny_encoder: Path) -> None:
    contract = objective_of(tiny_encoder).contextual.contract
    inputs = {"batches": "a" * 64, "encoder.model": "b" * 64}
    config = {"objective": {"kind": "contextual"}}
    card = model_card("base", config, inputs, contract, [], paper=ContextualSettings.paper)
    assert "the lines above load a fallback" in card
    assert "| architecture | contextual, 64 vectors |" in card
    assert "Contextual Document Embeddings" in card


class Killed(Callback):
    """Ends the run in its third step."""

    def on_step(self, point: Mapping[str, Any]) -> None:
        if point["step"] == 3:
            raise KeyboardInterrupt


def test_a_resumed_run_is_the_whole_run(tiny_encoder: Path, collection: str, tmp_path: Path) -> None:
    def run(folder: Path, *callbacks: Callback) -> tuple[dict[str, np.ndarray], Any]:
        objective = objective_of(tiny_encoder, context_documents=4, sequence_dropout=0.3, chunk_size=3)
        for module in objective.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        done = train(
            objective,
            TinyBatches(counts=(8, 8), size=6),
            tiny_settings(checkpoint_every=2),
            validation=opened(collection),
            checkpoints=Checkpoints(str(folder), {"kind": "contextual"}, keep=2),
            callbacks=callbacks,
        )
        objective.eval()
        objective.export(folder / "model")
        return weights_of(objective), done

    whole, done = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", Killed())
    resumed, again = run(tmp_path / "resumed")
    assert [e.measures for e in done.state.evaluations] == [e.measures for e in again.state.evaluations]
    assert_same(resumed, whole)
    towers = load_towers(EncoderSettings(model="model"), tmp_path / "resumed" / "model", "f" * 64)
    assert towers.contract.architecture == "contextual, 4 vectors"
    assert towers.contract.context is None


def test_a_context_that_marks_most_pairs_is_said_before_a_run(tiny_encoder: Path, logged: list[str]) -> None:
    def check(**settings: Any) -> None:
        objective_of(tiny_encoder, **settings).check_batches(SimpleNamespace(batch_size=64))

    check(context_documents=32)
    check(context_documents=64, own_documents_in_context=True)
    check(context_documents=64, share_negatives="step")
    assert logged == []
    check(context_documents=33)
    assert "context_documents is 33 of batches of 64" in logged[0]
    assert "context_documents to 16" in logged[0]
