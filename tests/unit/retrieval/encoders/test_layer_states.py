"""States of chosen layers are those of transformers' ``output_hidden_states``, with gradients, however blocks run."""

import copy
from typing import Any, get_args

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.multi_vector import LayerStates
from retrieval.encoders.pooling import pool
from retrieval.encoders.specification import EncoderSettings, LoraSettings, Pooling
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks
from tests.unit.retrieval.encoders.tiny_models import ARCHITECTURES, TEXTS, load_tiny, tiny_model


def bert(pooling: str = "cls") -> tuple[TextEncoder, dict[str, Tensor], LayerStates]:
    """An encoder, its features of all texts, and what gives the states of both its layers."""
    encoder = load_tiny(tiny_model("bert"), pooling=pooling)
    return encoder, encoder.tokenize(TEXTS, "document"), LayerStates(encoder.transformer, (1, 2))


def all_layers(encoder: TextEncoder) -> LayerStates:
    config: Any = encoder.transformer.config
    return LayerStates(encoder.transformer, tuple(range(1, config.num_hidden_layers + 1)))


def of_transformers(encoder: TextEncoder, features: dict[str, Tensor]) -> Tensor:
    """(n, L, hidden), layers 1 to L."""
    output = encoder.transformer(**features, output_hidden_states=True)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    states = [pool(each, features["attention_mask"], encoder.contract.pooling) for each in output.hidden_states[1:]]
    return torch.stack(states, dim=1)


def gradients(encoder: TextEncoder, states: Tensor) -> dict[str, Tensor]:
    """Of a number that depends on every layer in another way."""
    encoder.zero_grad()
    weights = torch.linspace(0.5, 2.0, states[0].numel()).reshape(states.shape[1:])
    (states * weights).sin().sum().backward()
    return {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


def assert_gradients_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert ours
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_and_gradients_equal_those_of_transformers(name: str) -> None:
    """In double precision: decoders are computed without the mask that they have here, by another kernel."""
    encoder = load_tiny(tiny_model(name), pooling="mean").double()
    for pooling in get_args(Pooling):
        encoder.contract = encoder.contract.model_copy(update={"pooling": pooling})
        features = encoder.tokenize(TEXTS, "document")
        layers, expected = all_layers(encoder), of_transformers(encoder, features)
        states = layers(encoder.transformer, features, pooling)
        torch.testing.assert_close(states, expected, atol=0, rtol=0)
        with torch.inference_mode():
            torch.testing.assert_close(layers(encoder.transformer, features, pooling), states.detach())
    assert_gradients_equal(gradients(encoder, states), gradients(encoder, expected))


def test_the_last_state_alone_is_normed() -> None:
    """A T5's last layer is its last_hidden_state, behind the final norm; the one before is its block's output."""
    encoder = load_tiny(tiny_model("t5"), pooling="mean")
    features = encoder.tokenize(TEXTS, "document")
    blocks: list[Tensor] = []
    for block in encoder.transformer.encoder.block:
        block.register_forward_hook(lambda _block, _inputs, output: blocks.append(output[0]))
    with torch.no_grad():
        states = LayerStates(encoder.transformer, (1, 2))(encoder.transformer, features, "cls")
        normed = encoder.transformer.encoder.final_layer_norm(blocks[1][:, 0])
    torch.testing.assert_close(states, torch.stack([blocks[0][:, 0], normed], dim=1))
    assert (states[:, 1] - blocks[1][:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert", "qwen2"])
@pytest.mark.parametrize("how", [checkpoint_activations, lambda model: compile_blocks(model, "eager")])
def test_blocks_may_be_computed_again_or_compiled(name, how) -> None:
    """In double precision, as above."""
    plain = load_tiny(tiny_model(name), pooling="mean").double()
    settings = EncoderSettings(model="any", pooling="mean")
    changed = load_encoder(settings, tiny_model(name), "", dropout=0.0).train().double()
    features = plain.tokenize(TEXTS, "document")
    expected, layers = of_transformers(plain, features), all_layers(changed)
    how(changed.transformer)
    changed(features)  # a pass in which no layer is asked for comes first
    states = layers(changed.transformer, features, "mean")
    torch.testing.assert_close(states, expected)
    assert_gradients_equal(gradients(changed, states), gradients(plain, expected))


def test_the_whole_transformer_may_be_compiled() -> None:
    encoder, features, layers = bert()
    expected = of_transformers(encoder, features)
    compiled = torch.compile(encoder.transformer, backend="eager")
    compiled(**features)
    for _ in range(2):
        torch.testing.assert_close(layers(compiled, features, "cls"), expected)


def test_the_gradient_cache_encodes_again() -> None:
    encoder, features, layers = bert()
    checkpoint_activations(encoder.transformer)
    expected = of_transformers(encoder, features)
    states = checkpoint(layers, encoder.transformer, features, "cls", use_reentrant=False)
    torch.testing.assert_close(states, expected)
    assert_gradients_equal(gradients(encoder, states), gradients(encoder, expected))


def test_lora_is_trained_through_every_layer() -> None:
    encoder, features, layers = bert()
    add_adapter(encoder.transformer, LoraSettings(rank=2))
    torch.manual_seed(0)
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    expected = of_transformers(encoder, features)
    states = layers(encoder.transformer, features, "cls")
    torch.testing.assert_close(states, expected)
    first = {name: grad for name, grad in gradients(encoder, states[:, :1]).items() if grad.abs().max() > 0}
    assert first
    assert all("lora_" in name and ".0." in name for name in first)  # the first layer's state needs the first block
    after = all_layers(encoder)(encoder.transformer, features, "cls")  # made after the adapter
    torch.testing.assert_close(after, expected)


def test_autocast_gives_float32_near_the_exact_states() -> None:
    encoder, features, layers = bert("mean")
    expected = of_transformers(encoder, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = layers(encoder.transformer, features, "mean")
    assert states.dtype == torch.float32
    assert 1e-4 < (states - expected).abs().max() < 0.1


def test_a_copy_keeps_states_of_its_own() -> None:
    encoder, features, layers = bert()
    transformer, copied = copy.deepcopy((encoder.transformer, layers))
    with torch.no_grad():
        transformer.encoder.layer[0].output.LayerNorm.bias.add_(1.0)
        ours, theirs = layers(encoder.transformer, features, "cls"), copied(transformer, features, "cls")
    torch.testing.assert_close(theirs[:, 0], ours[:, 0] + 1.0)


def test_layers_that_share_their_weights_are_refused() -> None:
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.AlbertConfig(vocab_size=50, num_hidden_layers=3, num_attention_heads=2, **sizes)
    with pytest.raises(UserError, match="AlbertModel has 3 layers but 1 blocks"):
        LayerStates(transformers.AlbertModel(config), (1, 3))
