"""A language model with in-batch attention: what must hold for any, and what its switches may not change."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.specification import LoraSettings
from tests.unit.trainers.objectives.revela.equations import InBatchLlama, Llama
from tests.unit.trainers.objectives.revela.models import SIZES, batch, causal_model, in_float64
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.revela.objective import in_batch_similarity

LORA = LoraSettings(rank=256, alpha=64, dropout=0.1, targets="all_linear")

pytestmark = pytest.mark.usefixtures("small_tensors")


def with_lora(**settings: Any) -> InBatchLanguageModel:
    """LoRA whose matrices are none of them zero."""
    plain = add_adapter(causal_model(), LORA)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return InBatchLanguageModel(plain, **settings)


def step(model: InBatchLanguageModel, given: tuple[Tensor, Tensor, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The loss, and the gradients in Sim and all weights."""
    input_ids, mask, similarity = given
    similarity = similarity.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, _ = model(input_ids, mask, similarity)
    loss.backward()
    assert similarity.grad is not None
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), "similarity": similarity.grad, **found}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        largest = float(expected[name].abs().max())
        assert_close(found[name], expected[name], rtol=0, atol=tolerance * largest, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("value_normalization", [True, False])
def test_retriever_gets_the_gradient_of_the_equations(value_normalization: bool) -> None:
    """From vectors over Sim to the loss, in float64."""
    plain = causal_model()
    weights = {name: tensor.detach().double() for name, tensor in plain.state_dict().items()}
    epsilon, theta = plain.config.rms_norm_eps, plain.config.rope_parameters["rope_theta"]
    llama = Llama(weights, SIZES["num_hidden_layers"], 4, 2, epsilon, theta)
    equations = InBatchLlama(llama, value_normalization)
    model = in_float64(InBatchLanguageModel(plain, value_normalization=value_normalization))
    input_ids, mask, _ = batch()
    documents = [ids[: int(kept.sum())] for ids, kept in zip(input_ids, mask, strict=True)]
    vectors = [torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    similarity = in_batch_similarity(*vectors, 0.1)
    loss, _ = model(input_ids, mask, similarity)
    expected = equations.loss(documents, similarity)
    assert_close(loss, expected, rtol=0, atol=1e-10)
    for each in zip(*(torch.autograd.grad(one, vectors, retain_graph=True) for one in (loss, expected)), strict=True):
        assert_close(*each, rtol=1e-8, atol=1e-10)


def test_padding_changes_nothing() -> None:
    model = in_float64(InBatchLanguageModel(causal_model()))
    input_ids, mask, similarity = batch()
    similarity = similarity.double()
    expected = step(model, (input_ids, mask, similarity))
    wider = nn.functional.pad(mask, (0, 5))
    other_padding = nn.functional.pad(input_ids, (0, 5)).masked_fill(wider == 0, 11)
    assert_equal(step(model, (other_padding, wider, similarity)), expected, 1e-10)


def test_computing_again_changes_nothing() -> None:
    """Dropout of attention included: every random state is restored."""
    plain = causal_model(attention_dropout=0.3)
    given = batch()
    expected = step(InBatchLanguageModel(plain).train(), given)
    for switch in ({"activation_checkpointing": True}, {"recompute_reading": False}):
        assert_equal(step(InBatchLanguageModel(plain, **switch).train(), given), expected, 1e-6)
    other = step(InBatchLanguageModel(plain).train(), given, seed=1)
    assert abs(other["loss"] - expected["loss"]) > 1e-3  # there is dropout
    plain.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_equal(step(InBatchLanguageModel(plain).train(), given), expected, 1e-6)  # its own switch drops nothing
    checkpointed = step(with_lora(activation_checkpointing=True).train(), given)
    assert_equal(checkpointed, step(with_lora().train(), given), 1e-6)


def test_checkpointing_keeps_a_layer_s_inputs_alone() -> None:
    def kept(**settings: bool) -> int:
        model = InBatchLanguageModel(causal_model(num_hidden_layers=8), **settings).train()
        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss, _ = model(*batch((40,) * 6))
            assert loss.requires_grad
            return sum(sizes.values())

    assert kept(activation_checkpointing=True) < kept() / 8
    assert kept() < kept(recompute_reading=False) / 1.5


def test_lora_is_what_is_trained() -> None:
    model = with_lora()
    found = step(model.eval(), batch())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == found.keys() - {"loss", "similarity"}
    assert len(trained) == 2 * 7 * SIZES["num_hidden_layers"]  # two matrices beside each of seven
    assert all("lora_" in name and found[name].any() for name in trained)
    plain = step(InBatchLanguageModel(causal_model()), batch())
    assert abs(plain["loss"] - found["loss"]) > 1e-3


def test_a_frozen_model_gives_the_same_gradient_and_keeps_nothing_of_the_e_stream() -> None:
    given = batch()
    expected = step(InBatchLanguageModel(causal_model()), given)
    model = InBatchLanguageModel(causal_model(), frozen=True)
    streams: list[tuple[Tensor, Tensor]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, output: streams.append(output))
    found = step(model, given)
    assert found.keys() == {"loss", "similarity"}
    assert_equal(found, {name: expected[name] for name in found}, 1e-5)
    assert [e_states is not None and e_states.requires_grad for e_states, _ in streams] == [False] * 3
    assert all(h_states.requires_grad for _, h_states in streams)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_near_float32(model_type: str) -> None:
    model = InBatchLanguageModel(causal_model(model_type, tie_word_embeddings=False))
    expected = step(model, batch())
    with torch.autocast("cpu", torch.bfloat16):
        found = step(model, batch())
    assert abs(found["loss"] - expected["loss"]) < 0.01 * expected["loss"]
    left, right = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    assert nn.functional.cosine_similarity(left, right, dim=0) > 0.999


def test_documents_that_can_t_be_read_are_refused() -> None:
    model = InBatchLanguageModel(causal_model())
    input_ids, mask, similarity = batch()
    with pytest.raises(ValueError, match="right-padded"):
        model(input_ids, mask.flip(1), similarity)
    with pytest.raises(UserError, match="two tokens"):
        model(input_ids[:, :1], mask[:, :1], similarity)
    mask[3] = 0
    with pytest.raises(UserError, match="Document 4 of 5 in a batch has no token"):
        model(input_ids, mask, similarity)
