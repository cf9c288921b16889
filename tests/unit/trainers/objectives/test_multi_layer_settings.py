import pytest
from pydantic import ValidationError

from raytriever.errors import UserError
from retrieval.encoders.specification import VectorForm
from tests.unit.trainers.tiny_multi_vector import COMBINATIONS, FORMS
from trainers.objectives.pair_settings import MultiLayerSettings


@pytest.mark.parametrize(("form", "training_form"), [(None, "dual_encoder"), *COMBINATIONS])
def test_every_reduction_that_is_trained_is_allowed_and_no_other(form, training_form):
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
            with pytest.raises(
                UserError, match=rf"'{training_form}' does not train .* reduction '{reduction}' searches"
            ):
                settings.require_form(vector_form)


def test_documents_of_one_vector_train_no_several():
    with pytest.raises(UserError, match="documents of several vectors, but the encoder's form is single"):
        MultiLayerSettings(training_form="multi_vector").require_form(VectorForm())


@pytest.mark.parametrize(
    "settings",
    [
        {"training_form": "self_contrastive"},
        {"training_form": "last_reg"},
        {"training_form": "multi_vector", "regularisation": 1.0},
        {"training_form": "dual_encoder", "regularisation": 0.0},
    ],
)
def test_regularisation_belongs_to_its_forms(settings):
    with pytest.raises(ValidationError, match="regularisation"):
        MultiLayerSettings(**settings)
