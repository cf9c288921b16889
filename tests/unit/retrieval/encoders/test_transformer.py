"""Attention by any kernel; blocks computed again or compiled; models in bfloat16, whose tables of positions are not."""

import copy
from collections.abc import Iterator
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
from retrieval.encoders.structure import place_module, transformer_blocks
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks, first_line, set_dropout
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    POSITIONS,
    SENTENCES,
    TEXTS,
    VOCABULARY,
    load_tiny,
    tiny_model,
)
from trainers.engine.gradient_cache import cut_by_length, encode_chunks


def trainable(folder: Path, dropout: float) -> TextEncoder:
    encoder = load_encoder(EncoderSettings(model=str(folder), pooling="mean"), folder, "a" * 64, dropout)
    return encoder.train()


def gradients(encoder: TextEncoder, cached: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    encoder.zero_grad()
    torch.manual_seed(2)
    vectors = encode_chunks(encoder, cut_by_length(encoder.tokenize(TEXTS, "query"), 3), cached=cached)
    (vectors.square().sum() + vectors[:, 0].sum()).backward()
    return vectors.detach(), {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}


def kept_bytes(encoder: TextEncoder) -> int:
    """Of what the backward pass will read, weights left out."""
    weights = {parameter.data_ptr() for parameter in encoder.parameters()}
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(0 if tensor.data_ptr() in weights else tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        encoder(encoder.tokenize(SENTENCES, "query"))
    return sum(sizes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations_computed_again_leave_gradients_as_they_are(name: str) -> None:
    folder = tiny_model(name)
    plain, again = trainable(folder, 0.3), trainable(folder, 0.3)
    checkpoint_activations(again.transformer)
    expected, found = gradients(plain), gradients(again)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert max(float(gradient.abs().max()) for gradient in expected[1].values()) > 1e-3
    torch.testing.assert_close(gradients(again, cached=True)[1], expected[1], atol=0, rtol=0)
    assert kept_bytes(again) < kept_bytes(plain) / 2
    assert again.state_dict().keys() == plain.state_dict().keys()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_give_the_same_gradients_and_export(tmp_path: Path) -> None:
    folder = tiny_model("bert")
    plain, compiled = trainable(folder, 0.0), trainable(folder, 0.0)
    passes: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]):
        passes.append(len(graph.graph.nodes))
        return graph.forward

    compile_blocks(compiled.transformer, backend=counting)
    checkpoint_activations(compiled.transformer)
    expected = gradients(plain)
    for cached in (False, True):
        found = gradients(compiled, cached)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert 0 < len(passes) <= 4  # not once a block, a chunk and a length
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    seen: list[int] = []
    hook = transformer_blocks(compiled.transformer)[0].register_forward_hook(lambda *_: seen.append(1))
    compiled.eval()
    found_vectors = encode_texts(compiled, TEXTS, "query")
    assert seen  # hooks that come later are called too
    hook.remove()
    compiled.save(tmp_path / "exported")
    exported = load_tiny(tmp_path / "exported")
    np.testing.assert_allclose(encode_texts(exported, TEXTS, "query"), found_vectors, rtol=1e-4, atol=1e-4)


def test_every_number_with_dropout_in_its_name_is_set_and_an_error_has_a_first_line() -> None:
    config = transformers.PretrainedConfig(dropout=0, a_dropout=0.1, use_dropout=True, dropout_kind="any", width=3)
    set_dropout(config, 0.5)
    found = [config.dropout, config.a_dropout, config.use_dropout, config.dropout_kind, config.width]
    assert found == [0.5, 0.5, True, "any", 3]
    assert [first_line(ValueError(text)) for text in ("\n a\nb", "")] == ["a", "ValueError"]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Sequential has no list of blocks"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)))


ROTARY = ("llama", "qwen2", "smollm2", "qwen3", "gemma3", "modernbert", "nomic_bert")
CONFIGURATIONS = {name: (each.config, each.settings) for name, each in ARCHITECTURES.items()} | {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS},
    ),
    "sliding": ("MistralConfig", ARCHITECTURES["llama"].settings | {"sliding_window": 8}),  # causal, within 8 tokens
}
CAUSAL = {"llama", "smollm2", "qwen2", "qwen3", "gpt2", "sliding"}
LENGTHS = torch.tensor([POSITIONS, 7, 19, 1])


def made(name: str, implementation: str | None = None, **more: Any) -> nn.Module:
    config_class, settings = CONFIGURATIONS[name]
    config = getattr(transformers, config_class)(**settings | more, attn_implementation=implementation)
    config.use_cache = False
    torch.manual_seed(0)
    loader: Any = transformers.T5EncoderModel if name == "t5" else transformers.AutoModel.from_config
    model: nn.Module = loader(config).eval()
    return model


def sharp(name: str) -> nn.Module:
    """Two layers whose attention looks at few tokens, as trained attention does."""
    model: Any = made(name, "eager", max_position_embeddings=8192)
    model.config.use_cache = True  # else places that jump are those of packed texts
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 2 and "att" in key:
                weight.normal_(std=0.5)
            elif key.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(4.0)  # which else undo it
    return model


def token_states(model: nn.Module, length: int) -> Tensor:
    """Of 128 tokens spread over a text of ``length``, (128, width)."""
    tokens = torch.randint(5, 300, (1, 128), generator=torch.Generator().manual_seed(length))
    places = torch.arange(0, length, length // 128)[None]
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=places).last_hidden_state[0].double()


@pytest.mark.parametrize("name", [name for name in ROTARY if name != "smollm2"])  # of the same class as llama
def test_positions_keep_their_precision(name: str) -> None:
    exact = sharp(name)
    placed, cast = copy.deepcopy(exact), copy.deepcopy(exact).to(torch.bfloat16)
    place_module(placed, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in placed.parameters()} == {torch.bfloat16}
    tables = {key: table for key, table in placed.named_buffers() if table.is_floating_point()}
    assert any("inv_freq" in key for key in tables)
    assert all(table.equal(exact.get_buffer(key)) for key, table in tables.items())
    for length in (128, 1024, 8192):
        expected = token_states(exact, length)
        models = (placed, cast) if length == 8192 else (placed,)
        found = [(1 - nn.functional.cosine_similarity(expected, token_states(model, length), dim=-1)).mean()
                 for model in models]  # fmt: skip
        assert found[0] < 0.05, (length, found)
    assert found[1] > 2 * found[0], found


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ROTARY])
def test_weights_of_other_families_are_all_that_counts(name: str) -> None:
    model = made(name)
    place_module(model, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not [key for key, table in model.named_buffers() if table.is_floating_point() and table.numel() > 1]


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

    with torch.device("meta"):  # for tensors that name none
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
    message = r"attention: flash_attention_2 isn't available .* on every node\. Or leave it out"
    with pytest.raises(UserError, match=message):
        load_encoder(flash, tiny_encoder, "x")
