"""Settings of objectives that contradict one another are refused, and the message says which."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytriever.errors import UserError
from retrieval.encoders.specification import EncoderSettings, LoraSettings, VectorForm
from retrieval.encoders.towers import Towers, load_towers
from tests.unit.trainers.tiny_multi_vector import COMBINATIONS, FORMS
from trainers.objective import build_objective
from trainers.objectives.chunk_settings import ReplugSettings, TrainedModelSettings
from trainers.objectives.coder.settings import CoderSettings
from trainers.objectives.pair_settings import (
    AdaptiveMarginSettings,
    ContrastiveSettings,
    MarginMseSettings,
    MultiLayerSettings,
)
from trainers.run_settings import AnyObjectiveSettings

TRANSFORMER = {"kind": "transformer"}


def coder(**settings: Any) -> CoderSettings:
    return CoderSettings(documents="vectors", **settings)


@pytest.mark.parametrize(("kind", "settings", "message"), [
    (ContrastiveSettings, {"matryoshka": (16, 4)}, r"matryoshka \[16, 4\] must be ascending"),
    (ContrastiveSettings, {"distillation": 0.5, "share_negatives": "step"}, "scores of a batch's documents alone"),
    (AdaptiveMarginSettings, {"target": "static"}, "margin is needed with target 'static'"),
    (AdaptiveMarginSettings, {"target": "adaptive", "margin": 0.3}, "is needed with target 'static'"),
    (AdaptiveMarginSettings, {"target": "distributed", "in_batch": False}, "so it needs them"),
    (AdaptiveMarginSettings, {"target": "adaptive", "share_negatives": "step"}, "set in_batch to true too"),
    (MarginMseSettings, {"share_negatives": "step"}, "a row is compared only with its own"),
    (MultiLayerSettings, {"training_form": "dual_encoder", "matryoshka": (4,)}, "one vector a document"),
    (MultiLayerSettings, {"training_form": "self_contrastive"}, "regularisation"),
    (MultiLayerSettings, {"training_form": "last_reg"}, "regularisation"),
    (MultiLayerSettings, {"training_form": "multi_vector", "regularisation": 1.0}, "regularisation"),
    (MultiLayerSettings, {"training_form": "dual_encoder", "regularisation": 0.0}, "regularisation"),
    (coder, {"loss": "info_nce", "binary_labels": True}, "shape the target of list_net, not info_nce"),
    (coder, {"loss": "info_nce", "label_normalization": "max"}, "shape the target of list_net, not info_nce"),
    (coder, {"loss": "max_margin", "smoothing": {}}, "smoothing makes graded labels for list_net"),
    (coder, {"binary_labels": True, "smoothing": {}}, "smoothing makes graded labels for list_net"),
    (coder, {"margin_divisor": "padded_width"}, "belongs to the loss max_margin"),
    (coder, {"temperature": 0}, "temperature"),
    (coder, {"retrieved_negatives": 5, "candidates": 10}, "drawn negatives, but negatives is 'retrieved'"),
    (coder, {"retrieved_negatives": 5, "negatives": "corpus"}, "some of a list's 'candidates': set 'candidates'"),
    (coder, {"scoring": TRANSFORMER, "similarity": "cosine"}, "set similarity to inner_product"),
    (coder, {"scoring": {"kind": "similarity", "query_encoder": "frozen"}}, "query_encoder"),
    (coder, {"scoring": {"kind": "recurrent"}}, "'similarity', 'transformer'"),
    (ReplugSettings, {"scores": "s", "similarity": "symmetric", "first_half": ["prose"]}, "similarity has none"),
    (TrainedModelSettings, {"model": "any", "frozen": True, "lora": LoraSettings()}, "frozen trains nothing"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**settings)


REQUIRED: dict[str, dict[str, Any]] = {
    "multi_layer": {"training_form": "multi_vector"},
    "coder": {"documents": "vectors"},
    "revela": {"language_model": {"model": "any"}},
    "replug": {"scores": "scores"},
}


@pytest.mark.parametrize("kind", AnyObjectiveSettings.__args__[0].__args__, ids=lambda kind: kind.__name__)
def test_no_objective_takes_two_sizes_of_a_chunk(kind: Any) -> None:
    settings = REQUIRED.get(kind.model_fields["kind"].default, {})
    assert kind.model_validate(settings | {"chunk_size": 8}).chunk_size == 8
    with pytest.raises(ValidationError, match=r"chunk_tokens is 512 and chunk_size 8, .* leave one out"):
        kind.model_validate(settings | {"chunk_tokens": 512, "chunk_size": 8})


@pytest.mark.parametrize(("form", "training_form"), [(None, "dual_encoder"), *COMBINATIONS])
def test_every_reduction_that_is_trained_is_allowed_and_no_other(form: str | None, training_form: str) -> None:
    weight = {"regularisation": 0.1} if training_form in ("self_contrastive", "last_reg") else {}
    settings = MultiLayerSettings(training_form=training_form, **weight)
    if form is None:
        settings.require_form(VectorForm())
        return
    allowed = {"average": {"average"}, "scalar_mix": {"scalar_mix"}, "multi_vector": {"none", "last"}}
    for reduction in {"none", "last", "average", "scalar_mix"} - ({"scalar_mix"} if form == "all_tokens" else set()):
        vector_form = VectorForm(**FORMS[form], reduction=reduction)
        if reduction in allowed.get(training_form, {"last"}):
            settings.require_form(vector_form)
        else:
            message = rf"'{training_form}' does not train .* reduction '{reduction}' searches"
            with pytest.raises(UserError, match=message):
                settings.require_form(vector_form)


def test_documents_of_one_vector_train_no_several() -> None:
    with pytest.raises(UserError, match="documents of several vectors, but the encoder's form is single"):
        MultiLayerSettings(training_form="multi_vector").require_form(VectorForm())


def test_encoders_that_an_objective_does_not_train_are_refused(tiny_encoder: Path) -> None:
    def load(**settings: Any) -> Towers:
        encoder = EncoderSettings(model=str(tiny_encoder), pooling="cls", **settings)
        return load_towers(encoder, tiny_encoder, "f" * 64)

    two, several = Towers(load().query, load().document), load(form=VectorForm(kind="layers", layers=(1, 2)))
    with pytest.raises(UserError, match="margin_mse doesn't train an encoder of documents of its own"):
        build_objective(MarginMseSettings(), two)
    with pytest.raises(UserError, match=r"contrastive doesn't train several vectors a document \(encoder\.form\)"):
        build_objective(ContrastiveSettings(), several)
    assert build_objective(ContrastiveSettings(), two).encoder("document") is two.document
    assert build_objective(MarginMseSettings(), load()).encoder("query").dimension == 32


@pytest.mark.parametrize("key", ["query_max_length", "document_max_length"])
def test_lengths_that_do_not_fit_are_refused_by_name(tiny_encoder: Path, key: str) -> None:
    """Those that leave nothing of a text, and those longer than the encoder reads."""
    settings = EncoderSettings(model=str(tiny_encoder), pooling="cls", max_length=8)
    towers = load_towers(settings, tiny_encoder, "f" * 64)
    too_short = "but special tokens take 2"
    for wanted, said in ((1, too_short), (2, too_short), (9, "but the encoder reads 8 tokens")):
        with pytest.raises(UserError, match=rf"objective\.{key} is {wanted}, {said}"):
            build_objective(ContrastiveSettings.model_validate({key: wanted}), towers)
    objective = build_objective(ContrastiveSettings.model_validate({key: 3}), towers)
    assert objective.encoder("query") is towers.query
