"""Blocks that compute their activations again, and compiled blocks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.structure import transformer_blocks
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks
from tests.unit.retrieval.encoders.tiny_models import ARCHITECTURES, SENTENCES, TEXTS, load_tiny, save_tiny_model
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
def test_activations_computed_again_leave_gradients_as_they_are(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    plain, again = trainable(folder, 0.3), trainable(folder, 0.3)
    checkpoint_activations(again.transformer)
    expected, found = gradients(plain), gradients(again)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert max(float(gradient.abs().max()) for gradient in expected[1].values()) > 1e-3
    for parameter, gradient in expected[1].items():
        assert torch.equal(found[1][parameter], gradient), parameter
    both = gradients(again, cached=True)
    assert all(torch.equal(both[1][parameter], gradient) for parameter, gradient in expected[1].items())
    assert kept_bytes(again) < kept_bytes(plain) / 2
    assert again.state_dict().keys() == plain.state_dict().keys()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_give_the_same_gradients_and_export(tmp_path: Path) -> None:
    folder = save_tiny_model("bert", tmp_path / "bert")
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
        for parameter, gradient in expected[1].items():
            torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-4, atol=1e-4)
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


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Sequential has no list of blocks"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)))
