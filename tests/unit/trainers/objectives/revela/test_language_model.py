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
from tests.unit.trainers.tiny import kept_bytes
from trainers.objectives.revela import language_model
from trainers.objectives.revela.cross_attention import find_readers
from trainers.objectives.revela.language_model import FAMILIES, InBatchLanguageModel, next_token_loss, require_decoder
from trainers.objectives.revela.objective import in_batch_similarity

LORA = LoraSettings(rank=256, alpha=64, dropout=0.1, targets="all_linear")


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
        return kept_bytes(lambda: model(*batch((40,) * 6)), model.parameters())

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


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama without groups, scaled positions": {
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}  # fmt: skip

each_kind = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str) -> Any:
    return causal_model(kind.split()[0], **KINDS[kind])


@each_kind
@pytest.mark.parametrize("frozen", [False, True])
def test_without_similarity_it_is_the_plain_model_and_what_is_read_counts(kind: str, frozen: bool) -> None:
    """And so is the e-stream, whatever the similarity."""
    plain = model_of(kind)
    input_ids, mask, similarity = batch()
    real, labels = mask.bool(), input_ids.masked_fill(mask == 0, -100)
    expected = plain(input_ids, mask, labels=labels, output_hidden_states=True)
    model = InBatchLanguageModel(plain, frozen=frozen)
    nothing = torch.zeros_like(similarity)
    logits = model.lm_head(model.last_states(input_ids, nothing, find_readers(mask, nothing)))
    assert_close(logits[real], expected.logits[real], rtol=1e-5, atol=1e-5)
    loss, tokens = model(input_ids, mask, nothing)
    assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert tokens == int((labels[:, 1:] >= 0).sum())
    again = plain(input_ids, mask, labels=labels)  # sharing its modules changes nothing of it
    assert_close(again.logits, expected.logits, rtol=0, atol=0)
    states: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, output: states.append(output[0]))
    read = model.last_states(input_ids, similarity, find_readers(mask, similarity))
    for number in (1, 2):
        assert_close(states[number - 1][real], expected.hidden_states[number][real], rtol=1e-5, atol=1e-5)
    assert states[-1] is None
    assert (read - expected.hidden_states[-1])[real].abs().max() > 0.05


@pytest.mark.parametrize("lengths", [(2, 1), (4, 3)], ids=["keys' heads", "queries' heads"])
def test_a_single_layer_on_as_many_tokens_as_it_has_heads(lengths: tuple[int, ...]) -> None:
    plain: Any = causal_model(num_hidden_layers=1)
    input_ids, mask, similarity = batch(lengths)
    nothing = torch.zeros_like(similarity)
    found = InBatchLanguageModel(plain).last_states(input_ids, nothing, find_readers(mask, nothing))
    real = mask.bool()
    assert_close(found[real], plain.model(input_ids, mask).last_hidden_state[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "gemma"])
def test_families_that_are_not_known_are_refused(model_type: str) -> None:
    model: Any = causal_model(model_type, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.name_or_path = "org/model"
    with pytest.raises(UserError, match=f"language model org/model is of the family '{model_type}'") as caught:
        InBatchLanguageModel(model)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_sliding_windows_and_missing_heads_are_refused() -> None:
    with pytest.raises(UserError, match="MistralForCausalLM attends within a sliding window of 8 tokens"):
        require_decoder(causal_model("mistral", sliding_window=8))
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(UserError, match="sliding window of 8 tokens"):
        require_decoder(causal_model("qwen2", **windowed))
    require_decoder(causal_model("qwen2", **windowed | {"max_window_layers": 9}))  # no layer has one
    with pytest.raises(UserError, match="LlamaModel has no language-modelling head"):
        require_decoder(model_of("llama").model)


TOKENS = (7, 1, 4)


def states_and_head() -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 7, 6, requires_grad=True), nn.Linear(6, 40), torch.randint(40, (3, 7))


@pytest.mark.parametrize("at_once", [40, 160, 10_000])
def test_it_is_the_mean_over_real_tokens_whatever_the_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "_LOGITS_AT_ONCE", at_once)
    states, head, input_ids = states_and_head()
    found, tokens = next_token_loss(states, head, input_ids, TOKENS)
    assert tokens == 9
    labels = input_ids.clone()
    for row, length in enumerate(TOKENS):
        labels[row, length:] = -100
    logits = head(states)
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(found, expected)
    parameters = (states, head.weight, head.bias)
    for each in zip(*(torch.autograd.grad(loss, parameters) for loss in (found, expected)), strict=True):
        assert_close(*each)


def test_logits_are_not_kept() -> None:
    states, head, input_ids = states_and_head()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        next_token_loss(states, head, input_ids, TOKENS)
    assert kept
    assert all(40 not in shape or shape == head.weight.shape or shape == head.bias.shape for shape in kept)


def test_bfloat16_logits_are_judged_in_float32() -> None:
    states, head, input_ids = states_and_head()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = next_token_loss(states, head, input_ids, TOKENS)
    assert found.dtype == torch.float32
    assert_close(found, next_token_loss(states, head, input_ids, TOKENS)[0], rtol=0.01, atol=0.0)


def test_nothing_to_predict_is_refused() -> None:
    states, head, input_ids = states_and_head()
    with pytest.raises(UserError, match="None of the 3 documents of a batch has two tokens"):
        next_token_loss(states, head, input_ids, (1, 1, 1))
