"""Whatever mask a family gets, states of real tokens are those of transformers with a 2D mask, and no host waits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.attention import last_states, mark_full
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from tests.unit.retrieval.encoders.tiny_models import ARCHITECTURES, POSITIONS, VOCABULARY

_LLAMA = ARCHITECTURES["llama"].settings
CONFIGURATIONS = {name: (each.config, each.settings) for name, each in ARCHITECTURES.items()} | {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS},
    ),
    "sliding": ("MistralConfig", _LLAMA | {"sliding_window": 8}),  # causal, in a window of 8 tokens
}
CAUSAL = {"llama", "smollm2", "qwen2", "qwen3", "gpt2", "sliding"}
LENGTHS = torch.tensor([POSITIONS, 7, 19, 1])


def made(name: str, implementation: str | None = None) -> nn.Module:
    config_class, settings = CONFIGURATIONS[name]
    config = getattr(transformers, config_class)(**settings, attn_implementation=implementation)
    config.use_cache = False
    torch.manual_seed(0)
    loader: Any = transformers.T5EncoderModel if name == "t5" else transformers.AutoModel.from_config
    model: nn.Module = loader(config).eval()
    return model


def features_of(lengths: Tensor) -> dict[str, Tensor]:
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(5, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(1))
    features = {"input_ids": ids, "attention_mask": mask}
    return mark_full(features) if bool(mask.all()) else features


def plain(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: features[name] for name in ("input_ids", "attention_mask")}


class Waits(TorchDispatchMode):
    """Counts the numbers that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1].expand(3)], ids=["padded", "full"])
@pytest.mark.parametrize("implementation", [None, "eager"], ids=["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_states_and_gradients_are_those_of_the_padded_computation(name, implementation, lengths):
    model, features = made(name, implementation), features_of(lengths)
    kept = features["attention_mask"].unsqueeze(-1)

    def run(states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        states = states.masked_fill(kept == 0, 0.0)
        states.sin().sum().backward()
        return states.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    found, gradients = run(last_states(model, features))
    expected, of_padded = run(model(**plain(features)).last_hidden_state)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for parameter, gradient in of_padded.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[parameter] / scale, gradient / scale, atol=1e-6, rtol=0, msg=parameter)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_host_asks_the_device_for_nothing(name: str) -> None:
    """But for one question of transformers' own, whether a decoder's texts are packed, where there is no mask."""
    model = made(name)
    for lengths in (LENGTHS, LENGTHS[:1].expand(3)):
        features = features_of(lengths)
        with torch.no_grad(), Waits() as ours:
            last_states(model, features)
        assert ours.count <= (name in CAUSAL)
        with torch.no_grad(), Waits() as theirs:
            model(**plain(features))
        assert theirs.count >= 1 or name not in ("bert", "llama"), "transformers asks no more: give it the 2D mask"


def test_code_of_the_models_own_gets_the_mask_as_it_is() -> None:
    """What it makes of another one, or of none, only its author knows."""
    seen = []

    class Own(transformers.BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["attention_mask"])
            return super().forward(*args, **kwargs)

    Own.__module__ = "transformers_modules.someone.modeling"
    model = Own(made("bert").config).eval()
    for lengths in (LENGTHS, LENGTHS[:1]):
        features = features_of(lengths)
        last_states(model, features)
        assert seen.pop() is features["attention_mask"]


def test_kernels_are_those_asked_for_or_an_error_says_what_is_missing(tiny_encoder: Path) -> None:
    vectors = []
    for kernel in ("auto", "eager", "sdpa"):
        encoder = load_encoder(EncoderSettings(model="x", pooling="mean", attention=kernel), tiny_encoder, "x")
        vectors.append(encode_texts(encoder, ["the sea", "a longer text about the sea"], "document"))
    assert encoder.transformer.config._attn_implementation == "sdpa"
    for other in vectors[1:]:
        np.testing.assert_allclose(vectors[0], other, atol=1e-6)
    flash = EncoderSettings(model="x", pooling="mean", attention="flash_attention_2")
    with pytest.raises(UserError, match=r"attention: flash_attention_2 can't be had .* on every node, or leave it out"):
        load_encoder(flash, tiny_encoder, "x")
