"""[CLS] and a linear layer: a fresh one or the model's pooler, and what is exported of it."""

import json

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from tests.unit.retrieval.encoders.tiny_models import (
    TEXTS,
    same_vectors_as_theirs,
    sentence_transformer,
    tiny_model,
    vectors_of,
)


def load(path, projection, fresh_seed=None, pooling="cls", **settings) -> TextEncoder:
    settings = EncoderSettings(model=str(path), pooling=pooling, projection=projection, **settings)
    return load_encoder(settings, path, "f" * 64, dropout=0.0, fresh_seed=fresh_seed).eval()


def test_a_fresh_layer_is_its_seeds_alone_and_for_training(tiny_encoder):
    torch.manual_seed(1)
    one = load(tiny_encoder, "linear", 5).dense[0].linear
    torch.manual_seed(2)
    again, other = (load(tiny_encoder, "linear", seed).dense[0].linear for seed in (5, 6))
    assert torch.equal(one.weight, again.weight)
    assert not torch.equal(one.weight, other.weight)
    assert one.weight.shape == (32, 32)
    assert one.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not one.bias.any()
    assert one.weight.requires_grad
    with pytest.raises(UserError, match=r"a fresh layer, .* before it is trained\. Train with it"):
        load(tiny_encoder, "linear")


def test_the_layer_is_behind_the_pooling_and_exported_as_a_dense_module(tiny_encoder, tmp_path):
    encoder = load(tiny_encoder, "linear", 3, max_length=24)
    states = vectors_of(load(tiny_encoder, None, max_length=24))
    layer = encoder.dense[0].linear
    with torch.no_grad():
        layer.bias += 0.5
    expected = states @ layer.weight.detach().numpy().T + 0.5
    np.testing.assert_allclose(vectors_of(encoder), expected, atol=1e-5)
    folder = tmp_path / "model"
    encoder.save(folder)
    config = json.loads((folder / "2_Dense" / "config.json").read_text())
    assert config["activation_function"] == "torch.nn.modules.linear.Identity"
    same_vectors_as_theirs(encoder, sentence_transformer(folder))
    loaded = load(folder, None, pooling="auto")
    np.testing.assert_allclose(vectors_of(loaded), expected, atol=1e-5)
    assert loaded.contract.projection is None
    another = load(folder, "linear", 4, pooling="auto")  # a fresh layer follows the folder's own
    assert [layer.linear.out_features for layer in another.dense] == [32, 32]
    assert len(load(folder, "linear", 4, pooling="auto", head="pooled").dense) == 1


@pytest.mark.parametrize("projection", ["pooler", "pooler_tanh"])
def test_the_models_own_pooler(tiny_encoder, tmp_path, projection):
    encoder = load(tiny_encoder, projection, max_length=24)
    features = encoder.tokenize(TEXTS, "document")
    with torch.no_grad():
        pooled = encoder.transformer(**features).pooler_output
        found = encoder(features)
    torch.testing.assert_close(found.tanh() if projection == "pooler" else found, pooled)
    assert encoder.contract.projection == projection
    with pytest.raises(UserError, match="projection"):
        encoder.contract.require_same(load(tiny_encoder, None, max_length=24).contract, "one", "other")
    trained = {name for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert "dense.0.linear.weight" in trained
    assert "transformer.pooler.dense.weight" not in trained
    encoder.save(tmp_path / "model")
    same_vectors_as_theirs(encoder, sentence_transformer(tmp_path / "model"))


def test_a_pooler_that_does_not_fit_is_refused(tiny_encoder):
    with pytest.raises(UserError, match="maps the first token's state, but pooling is mean"):
        load(tiny_encoder, "pooler", pooling="mean")
    message = r"its folder has no pooler from 32 to 32 features\. Set projection to 'linear'"
    with pytest.raises(UserError, match=message):
        load(tiny_model("distilbert"), "pooler")
