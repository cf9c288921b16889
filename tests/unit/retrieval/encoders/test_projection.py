"""[CLS] and a linear layer: a fresh one or the model's pooler, and what is exported of it."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from tests.unit.retrieval.encoders.tiny_models import SENTENCES, save_tiny_model


def load(path, projection, fresh_seed=None, pooling="cls", **settings) -> TextEncoder:
    settings = EncoderSettings(model=str(path), pooling=pooling, projection=projection, **settings)
    return load_encoder(settings, path, "f" * 64, dropout=0.0, fresh_seed=fresh_seed).eval()


def test_a_fresh_layer_is_its_seeds_alone(tiny_encoder):
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


def test_a_fresh_layer_is_for_training_alone(tiny_encoder):
    with pytest.raises(UserError, match=r"a fresh layer, .* before it is trained\. Train with it"):
        load(tiny_encoder, "linear")


def test_the_layer_is_behind_the_pooling_and_exported_as_a_dense_module(tiny_encoder, tmp_path):
    encoder = load(tiny_encoder, "linear", 3, max_length=24)
    states = encode_texts(load(tiny_encoder, None, max_length=24), SENTENCES, "document")
    layer = encoder.dense[0].linear
    with torch.no_grad():
        layer.bias += 0.5
    expected = states @ layer.weight.detach().numpy().T + 0.5
    np.testing.assert_allclose(encode_texts(encoder, SENTENCES, "document"), expected, atol=1e-5)
    encoder.save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "2_Dense" / "config.json").read_text())
    assert config["activation_function"] == "torch.nn.modules.linear.Identity"
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(SENTENCES, show_progress_bar=False)
    np.testing.assert_allclose(theirs, expected, atol=1e-5)
    loaded = load(tmp_path / "model", None, pooling="auto")
    np.testing.assert_allclose(encode_texts(loaded, SENTENCES, "document"), expected, atol=1e-5)
    assert loaded.contract.projection is None


@pytest.mark.parametrize("projection", ["pooler", "pooler_tanh"])
def test_the_models_own_pooler(tiny_encoder, tmp_path, projection):
    encoder = load(tiny_encoder, projection, max_length=24)
    features = encoder.tokenize(SENTENCES, "document")
    with torch.no_grad():
        pooled = encoder.transformer(**features).pooler_output
        found = encoder(features)
    if projection == "pooler":
        found = found.tanh()
    torch.testing.assert_close(found, pooled)
    assert encoder.contract.projection == projection
    trained = {name for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert "dense.0.linear.weight" in trained
    assert "transformer.pooler.dense.weight" not in trained
    encoder.save(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(SENTENCES, show_progress_bar=False)
    np.testing.assert_allclose(theirs, encode_texts(encoder, SENTENCES, "document"), atol=1e-5)


def test_a_pooler_that_does_not_fit_is_refused(tiny_encoder, tmp_path):
    with pytest.raises(UserError, match="maps the first token's state, but pooling is mean"):
        load(tiny_encoder, "pooler", pooling="mean")
    without = save_tiny_model("distilbert", tmp_path / "distilbert")
    with pytest.raises(
        UserError, match=r"its folder has no pooler from 32 to 32 features\. Set projection to 'linear'"
    ):
        load(without, "pooler")


def test_vectors_with_and_without_the_pooler_do_not_meet(tiny_encoder):
    with_pooler, plain = (load(tiny_encoder, projection).contract for projection in ("pooler", None))
    with pytest.raises(UserError, match="projection"):
        with_pooler.require_same(plain, "one", "other")


def test_a_fresh_layer_follows_the_folders_own(tiny_encoder, tmp_path):
    load(tiny_encoder, "linear", 3).save(tmp_path / "model")
    encoder = load(tmp_path / "model", "linear", 4, pooling="auto")
    assert [layer.linear.out_features for layer in encoder.dense] == [32, 32]
    bare = load(tmp_path / "model", "linear", 4, pooling="auto", head="pooled")
    assert len(bare.dense) == 1
