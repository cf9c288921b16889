"""LoRA that is trained inside a transformer, and its export as plain weights."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter, merged_weights
from retrieval.encoders.specification import LoraSettings
from tests.unit.retrieval.encoders.tiny_models import ARCHITECTURES, TEXTS, load_tiny, tiny_model, vectors_of

ROTARY = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
BERT = ["attention.output.dense", "attention.self.key", "attention.self.query", "attention.self.value"]
ATTENTION = dict.fromkeys(ARCHITECTURES, ROTARY) | {  # its matrices in the first block
    "bert": BERT,
    "roberta": BERT,
    "mpnet": ["attention.attn.k", "attention.attn.o", "attention.attn.q", "attention.attn.v"],
    "distilbert": ["attention.k_lin", "attention.out_lin", "attention.q_lin", "attention.v_lin"],
    "modernbert": ["attn.Wo", "attn.Wqkv"],
    "t5": ["layer.0.SelfAttention.k", "layer.0.SelfAttention.o", "layer.0.SelfAttention.q", "layer.0.SelfAttention.v"],
}
# matrices of a feed-forward layer; 3 where one of them is a gate
FEED_FORWARD = dict.fromkeys(["bert", "roberta", "mpnet", "distilbert", "modernbert", "t5"], 2)


def disturb(module: nn.Module) -> None:
    """As if trained: what is trainable moves, B from zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def adapted_modules(transformer: nn.Module) -> list[str]:
    return sorted(name.split(".lora_A")[0] for name, _ in transformer.named_parameters() if "lora_A" in name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_exported_encoder_equals_the_adapted_one(tmp_path: Path, name: str) -> None:
    folder = tiny_model(name)
    encoder = load_tiny(folder, pooling="mean")
    base = {key: value.clone() for key, value in encoder.transformer.state_dict().items()}
    untrained = vectors_of(encoder, "query")
    assert add_adapter(encoder.transformer, LoraSettings(rank=3, targets="all_linear")) is encoder.transformer
    np.testing.assert_array_equal(vectors_of(encoder, "query"), untrained)  # B is zero
    trainable = {key: value for key, value in encoder.transformer.named_parameters() if value.requires_grad}
    assert all("lora_" in key and value.dtype == torch.float32 for key, value in trainable.items())

    disturb(encoder.transformer)
    found = vectors_of(encoder, "query")
    assert np.abs(found - untrained).max() > 0.1
    before = copy.deepcopy(encoder.transformer.state_dict())
    encoder.save(tmp_path / "exported")
    after = encoder.transformer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)  # ready to be trained on
    assert merged_weights(encoder.transformer).keys() == base.keys()

    exported = load_tiny(tmp_path / "exported")
    assert exported.transformer.state_dict().keys() == base.keys()
    scale = np.abs(found).max()
    np.testing.assert_allclose(vectors_of(exported, "query") / scale, found / scale, atol=2e-6, rtol=0)
    theirs = SentenceTransformer(str(tmp_path / "exported"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(theirs / scale, found / scale, atol=2e-6, rtol=0)


def test_in_float64_the_merged_weights_are_the_adapted_ones() -> None:
    encoder = load_tiny(tiny_model("bert"), pooling="mean")
    transformer = add_adapter(encoder.transformer, LoraSettings(rank=3, alpha=7, targets="all_linear")).double()
    disturb(transformer)
    inputs = encoder.tokenize(TEXTS, "query")
    expected = transformer(**inputs).last_hidden_state
    plain = load_tiny(tiny_model("bert"), pooling="mean").transformer.double()
    plain.load_state_dict(merged_weights(transformer))
    torch.testing.assert_close(plain(**inputs).last_hidden_state, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_targets_by_kind(name: str) -> None:
    transformer, everything = (load_tiny(tiny_model(name), pooling="mean").transformer for _ in range(2))
    names = adapted_modules(add_adapter(transformer, LoraSettings(rank=2)))
    first = [target for target in names if next(part for part in target.split(".") if part.isdecimal()) == "0"]
    assert [target.split(".0.", 1)[1] for target in first] == ATTENTION[name]
    blocks = len(names) // len(ATTENTION[name])
    linear = adapted_modules(add_adapter(everything, LoraSettings(rank=2, targets="all_linear")))
    assert len(linear) == len(names) + blocks * FEED_FORWARD.get(name, 3)
    assert not [target for target in linear if "pooler" in target]


def test_targets_by_name_and_those_that_match_nothing() -> None:
    folder = tiny_model("bert")
    transformer = load_tiny(folder, pooling="mean").transformer
    wanted = LoraSettings(targets=["query", "encoder.layer.1.output.dense"])
    assert adapted_modules(add_adapter(transformer, wanted)) == [
        "encoder.layer.0.attention.self.query",
        "encoder.layer.1.attention.self.query",
        "encoder.layer.1.output.dense",
    ]
    untouched = load_tiny(folder, pooling="mean").transformer
    for targets in (["query", "q_proj"], ["uery"], []):
        with pytest.raises(UserError, match=r"of BertModel\. It has.*attention\.self\.query, .*intermediate\.dense"):
            add_adapter(untouched, LoraSettings(targets=targets))
    assert all(parameter.requires_grad for name, parameter in untouched.named_parameters() if "pooler" not in name)


def test_the_first_values_depend_on_the_seed_alone() -> None:
    folder = tiny_model("qwen2")

    def weights(seed: int) -> list[torch.Tensor]:
        transformer = load_tiny(folder, pooling="mean").transformer
        torch.rand(seed + 3)
        state = torch.get_rng_state()
        add_adapter(transformer, LoraSettings(rank=2), seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [value for name, value in transformer.named_parameters() if "lora_A" in name]

    assert all(torch.equal(a, b) for a, b in zip(weights(5), weights(5), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(5), weights(6), strict=True))
