"""The encoders as a run loads them: what they were before leaves no trace in what they are trained to be."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from retrieval.encoders.list_scorer import ListScorer, save_list_scorer
from retrieval.encoders.modules import read_document_model
from retrieval.encoders.specification import EncoderSettings, ListScorerForm
from retrieval.encoders.text_encoder import load_encoder
from retrieval.encoders.towers import load_towers
from trainers.objective import Objective, build_objective
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training

LAYERS = {"kind": "layers", "layers": [1, 2]}
DOCUMENTS = "d" * 64  # the fingerprint of another encoder's contract
MULTI_LAYER = {"kind": "multi_layer", "training_form": "multi_vector"}


@pytest.fixture(scope="module")
def plain(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with pooling settings of its own."""
    folder = tmp_path_factory.mktemp("plain") / "encoder"
    _load(tiny_encoder).save(folder)
    return folder


@pytest.fixture(scope="module")
def of_queries(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of queries alone, with a scoring module, as CODER exports it."""
    encoder = _load(tiny_encoder)
    encoder.contract = encoder.contract.model_copy(update={"document_model": DOCUMENTS})
    folder = tmp_path_factory.mktemp("coder") / "encoder"
    encoder.save(folder)
    save_list_scorer(ListScorer(ListScorerForm(heads=4), encoder.dimension), folder)
    return folder


def _load(folder: Path) -> Any:
    return load_encoder(EncoderSettings(model=str(folder), pooling="cls", normalize=False), folder, "f" * 64)


def settings_of(model: Path, objective: dict[str, Any], form: Any = None, **settings: Any) -> RunSettings:
    encoder = {"model": str(model)} | ({} if form is None else {"form": form})
    values = {"batches": "any", "encoder": encoder, "objective": objective, "training": {"bf16": False}}
    return RunSettings.model_validate(values | settings)


def objective_of(settings: RunSettings) -> Objective[Any]:
    located = settings.located()
    return build_objective(settings.objective, load_for_training(settings, located), located)


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "contrastive"},
        {"kind": "adaptive_margin"},
        {"kind": "contextual", "context_documents": 2},
        {"kind": "margin_mse"},
        MULTI_LAYER,
    ],
    ids=lambda objective: objective["kind"],
)
def test_an_encoder_of_queries_that_is_trained_on_is_one_of_documents_too(
    objective: dict[str, Any], of_queries: Path, tmp_path: Path
) -> None:
    form = LAYERS if objective == MULTI_LAYER else None
    trained = objective_of(settings_of(of_queries, objective, form))
    trained.eval()
    trained.export(tmp_path / "model")
    assert read_document_model(tmp_path / "model") is None
    exported = load_towers(EncoderSettings(model=str(tmp_path / "model")), tmp_path / "model", "f" * 64)
    for tower in (exported.query, exported.document):
        assert (tower.contract.document_model, tower.contract.list_scorer) == (None, None)


def test_each_of_two_encoders_may_have_been_one_of_queries(of_queries: Path, plain: Path, tmp_path: Path) -> None:
    for number, (query, document) in enumerate([(of_queries, plain), (plain, of_queries)]):
        own = {"document_encoder": {"model": str(document)}}
        objective_of(settings_of(query, {"kind": "contrastive"}, **own)).eval().export(tmp_path / str(number))
        assert read_document_model(tmp_path / str(number)) is None


def test_coder_knows_the_documents_that_its_encoder_was_trained_for(of_queries: Path) -> None:
    settings = settings_of(of_queries, {"kind": "coder", "documents": "any"})
    contract = load_for_training(settings, settings.located()).query.contract
    assert (contract.document_model, contract.list_scorer) == (DOCUMENTS, None)


def test_a_form_of_the_encoder_that_documents_do_not_have_is_refused(plain: Path) -> None:
    own = {"document_encoder": {"model": str(plain)}}
    for objective in ({"kind": "contrastive"}, {"kind": "multi_layer", "training_form": "dual_encoder"}):
        with pytest.raises(ValidationError, match=r"Set document_encoder\.form to it, and leave"):
            settings_of(plain, objective, LAYERS, **own)
    own["document_encoder"]["form"] = LAYERS
    settings = settings_of(plain, MULTI_LAYER, **own)
    assert str(load_for_training(settings, settings.located()).document.form) == "layers 1, 2"


def test_a_stored_form_is_trained_on_where_none_is_set(plain: Path, tmp_path: Path) -> None:
    objective_of(settings_of(plain, MULTI_LAYER, LAYERS)).eval().export(tmp_path / "model")
    trained = objective_of(settings_of(tmp_path / "model", MULTI_LAYER))
    assert str(trained.encoder("document").form) == "layers 1, 2"
    two = {"document_encoder": {"model": str(tmp_path / "model")}}
    assert str(objective_of(settings_of(plain, MULTI_LAYER, **two)).encoder("document").form) == "layers 1, 2"
    with pytest.raises(ValidationError, match=r"does not train what the encoder's reduction 'none' searches"):
        settings_of(tmp_path / "model", {"kind": "multi_layer", "training_form": "average"})
    shutil.rmtree(tmp_path / "model")  # such as one that is made before this run
    for model, changes, key in ((tmp_path / "model", {}, "encoder"), (plain, two, "document_encoder")):
        with pytest.raises(ValidationError, match=rf"but {key}\.form is not set, and .*model is no folder here that"):
            settings_of(model, MULTI_LAYER, **changes)
    settings_of(tmp_path / "model", {"kind": "multi_layer", "training_form": "dual_encoder"})
