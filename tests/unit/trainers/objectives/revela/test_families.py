"""Every family's layers are read as transformers runs them; others are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from raytriever.errors import UserError
from tests.unit.trainers.objectives.revela.models import batch, causal_model
from trainers.objectives.revela.language_model import FAMILIES, InBatchLanguageModel, require_decoder

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
pytestmark = pytest.mark.usefixtures("small_tensors")


def model_of(kind: str) -> Any:
    return causal_model(kind.split()[0], **KINDS[kind])


@each_kind
def test_without_similarity_it_is_the_plain_model(kind: str) -> None:
    plain = model_of(kind)
    input_ids, mask, similarity = batch()
    labels = input_ids.masked_fill(mask == 0, -100)
    expected = plain(input_ids, mask, labels=labels)
    model = InBatchLanguageModel(plain)
    nothing = torch.zeros_like(similarity)
    logits = model.lm_head(model.last_states(input_ids, mask, nothing))
    assert_close(logits[mask.bool()], expected.logits[mask.bool()], rtol=1e-5, atol=1e-5)
    loss, tokens = model(input_ids, mask, nothing)
    assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert tokens == int((labels[:, 1:] >= 0).sum())
    again = plain(input_ids, mask, labels=labels)  # sharing its modules changes nothing of it
    assert_close(again.logits, expected.logits, rtol=0, atol=0)


@each_kind
@pytest.mark.parametrize("frozen", [False, True])
def test_the_e_stream_is_the_plain_model_and_what_is_read_counts(kind: str, frozen: bool) -> None:
    plain = model_of(kind)
    input_ids, mask, similarity = batch()
    expected = plain(input_ids, mask, output_hidden_states=True)
    model = InBatchLanguageModel(plain, frozen=frozen)
    states: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, output: states.append(output[0]))
    read = model.last_states(input_ids, mask, similarity)
    for number in (1, 2):
        assert_close(states[number - 1][mask.bool()], expected.hidden_states[number][mask.bool()], rtol=1e-5, atol=1e-5)
    assert states[-1] is None
    assert (read - expected.hidden_states[-1])[mask.bool()].abs().max() > 0.05


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "gemma"])
def test_families_that_are_not_known_are_refused(model_type: str) -> None:
    with pytest.raises(UserError) as caught:
        require_decoder(causal_model(model_type, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    assert repr(model_type) in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_sliding_windows_and_missing_heads_are_refused() -> None:
    with pytest.raises(UserError, match="MistralForCausalLM attends within a sliding window of 8 tokens"):
        require_decoder(causal_model("mistral", sliding_window=8))
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(UserError, match="sliding window of 8 tokens"):
        require_decoder(causal_model("qwen2", **windowed))
    require_decoder(causal_model("qwen2", sliding_window=8, use_sliding_window=False))
    with pytest.raises(UserError, match="LlamaModel has no language-modelling head"):
        require_decoder(model_of("llama").model)
