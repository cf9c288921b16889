"""LoRA adapters: merged they give what PEFT gives unmerged; trained inside a transformer, exported as plain weights."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2Model

from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter, merged_weights
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import LoraSettings
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    DECODERS,
    TEXTS,
    edited,
    literal_vectors,
    load_tiny,
    same_vectors,
    same_vectors_as_theirs,
    save_sentence_transformer,
    sentence_transformer,
    tiny_model,
    vectors_of,
)


def save_adapter(base: Path, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """An adapter over ``base`` with random weights in both of its matrices, written by PEFT."""
    model = AutoModel.from_pretrained(base)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"]} | settings)))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def qwen() -> Path:
    """A base model."""
    return tiny_model("qwen2")


@pytest.fixture
def adapter(qwen: Path, tmp_path: Path) -> Path:
    """An adapter over it."""
    return save_adapter(qwen, tmp_path / "adapter")


@pytest.mark.parametrize("name", DECODERS)
def test_a_merged_adapter_equals_the_unmerged_one(tmp_path: Path, name: str) -> None:
    base = tiny_model(name)
    adapter = save_adapter(base, tmp_path / "adapter", use_rslora=True)
    encoder = load_tiny(adapter, pooling="last_token")
    assert not [parameter for parameter, _ in encoder.named_parameters() if "lora" in parameter]
    found = vectors_of(encoder, "query")
    unmerged = PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter).eval()
    expected = literal_vectors(unmerged, base, "last_token", append_eos=True)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.abs(found - vectors_of(load_tiny(base, pooling="last_token"), "query")).max() > 0.01
    encoder.save(tmp_path / "exported")
    same_vectors_as_theirs(encoder, sentence_transformer(tmp_path / "exported"))


@pytest.mark.parametrize(("name", "settings"), [
    ("bert", {"target_modules": ["query", "value"]}),  # with a pooler, which is never trained
    ("qwen2", {}),
    ("qwen2", {"target_modules": ["down_proj"], "modules_to_save": ["norm"]}),
])  # fmt: skip
def test_a_merged_encoder_is_trained_on_as_its_base_is(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    adapter = save_adapter(tiny_model(name), tmp_path / "adapter", **settings)
    plain, merged = (
        {key: parameter.requires_grad for key, parameter in load_tiny(path, pooling="mean").named_parameters()}
        for path in (tiny_model(name), adapter)
    )
    assert merged == plain
    assert {key for key, trained in plain.items() if not trained} == {key for key in plain if "pooler" in key}


def test_a_folder_of_sentence_transformers_may_hold_an_adapter(qwen: Path, adapter: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen / name, adapter)
    folder = save_sentence_transformer(adapter, tmp_path / "model", "lasttoken", prompts={"query": "q: "})
    assert (folder / "adapter_model.safetensors").exists()
    encoder = load_tiny(folder)
    assert (encoder.contract.pooling, encoder.contract.append_eos) == ("last_token", False)
    same_vectors_as_theirs(encoder, sentence_transformer(folder))


def test_an_adapter_alone_has_the_modules_of_its_base(qwen: Path, tmp_path: Path) -> None:
    base = save_sentence_transformer(qwen, tmp_path / "base", "mean", prompts={"query": "q: "})
    contract = load_tiny(save_adapter(base, tmp_path / "adapter")).contract
    assert (contract.pooling, contract.query_prompt) == ("mean", "q: ")


def test_an_adapter_of_a_model_with_a_head_fits_the_model_without_and_another_base_can_be_named(adapter, qwen):
    merged = load_tiny(adapter, pooling="mean")
    weights = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("base_model.model.", "base_model.model.model."): value for name, value in weights.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    same_vectors(load_tiny(adapter, pooling="mean"), merged)
    edited(adapter / "adapter_config.json", lambda config: config.update(base_model_name_or_path="/gone/away"))
    with pytest.raises(UserError, match=r"base model of the LoRA adapter .* is missing.*'/gone/away' is no folder"):
        load_tiny(adapter, pooling="mean")
    same_vectors(load_tiny(adapter, pooling="mean", base_model=str(qwen)), merged)
    with pytest.raises(UserError, match="is no LoRA adapter over another"):
        load_tiny(qwen, pooling="mean", base_model=str(qwen))


def test_the_fingerprint_covers_adapter_and_base(qwen: Path, tmp_path: Path) -> None:
    one, two = (str(save_adapter(qwen, tmp_path / name, seed)) for name, seed in (("one", 1), ("two", 2)))
    located = [locate_model(path) for path in (str(qwen), one, two)]
    located.append(locate_model(one, base_model=str(tiny_model("qwen2", 1))))
    assert len({each.fingerprint for each in located}) == 4
    assert locate_model(one, base_model=str(qwen)) == locate_model(one)
    assert load_tiny(Path(one), pooling="mean").contract.model == locate_model(one).fingerprint


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edited(folder / "adapter_config.json", change)


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")

    return damage


@pytest.mark.parametrize(("damage", "message"), [
    (_pickled, r"only as a pickle \(adapter_model.bin\)"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "can't be loaded"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "can't be loaded"),
    (_tensors(dict.popitem), "doesn't fit its base model: 1 tensors"),
    (_tensors(lambda weights: weights.update(another=torch.ones(1))), "1 tensors.*, the first another"),
    (_changed(lambda config: config.update(r=2)), "doesn't fit its base model: 8 tensors"),
    (_changed(lambda config: config.update(target_modules=["absent"])), "can't be loaded.*absent"),
    (_changed(lambda config: config.update(peft_type="PREFIX_TUNING")), r"kind PREFIX_TUNING\. Only LORA"),
    (_changed(lambda config: config.pop("base_model_name_or_path")), "names no base_model_name_or_path"),
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not readable JSON"),
])  # fmt: skip
def test_what_is_no_adapter_of_its_base_is_named(adapter, damage, message):
    damage(adapter)
    with pytest.raises(UserError, match=message) as raised:
        load_tiny(adapter, pooling="mean")
    assert str(adapter) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tokens_of_an_adapter_are_its_own(qwen: Path, adapter: Path) -> None:
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(qwen)
    plain = load_tiny(adapter, pooling="mean").tokenize_ids(["sea"], "query")
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    tokenizer.add_tokens(["sea"])
    tokenizer.save_pretrained(adapter)
    assert load_tiny(adapter, pooling="mean").tokenize_ids(["sea"], "query") == [[len(tokenizer) - 1]] != plain


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


def test_rank_alpha_and_dropout_count() -> None:
    def trained(**settings: float) -> Any:
        encoder = load_tiny(tiny_model("bert"), pooling="mean")
        disturb(add_adapter(encoder.transformer, LoraSettings.model_validate(settings)).train())
        return encoder.transformer(**encoder.tokenize(TEXTS, "query")).last_hidden_state

    settings, others = {"rank": 2, "alpha": 7, "dropout": 0.5}, ({}, {"rank": 3}, {"alpha": 8}, {"dropout": 0.25})
    is_same = [torch.equal(trained(**settings), trained(**settings | other)) for other in others]
    assert is_same == [True, False, False, False]


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
    torch.testing.assert_close(encoder.transformer.state_dict(), before, atol=0, rtol=0)  # ready to be trained on
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


def test_matrices_of_gpt2_are_modules_of_its_own() -> None:
    transformer = GPT2Model(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2))
    assert adapted_modules(add_adapter(transformer, LoraSettings(rank=2))) == ["h.0.attn.c_attn", "h.0.attn.c_proj"]


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
        message = r"of BertModel\. Its modules.*attention\.self\.query, .*intermediate\.dense"
        with pytest.raises(UserError, match=message):
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
