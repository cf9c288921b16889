"""The loss in pieces is the loss, and keeps no logits."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from raytriever.errors import UserError
from trainers.objectives.revela import language_model as module
from trainers.objectives.revela.language_model import next_token_loss

LENGTHS = (7, 1, 4)


def given() -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 7, 6, requires_grad=True), nn.Linear(6, 40), torch.randint(40, (3, 7))


@pytest.mark.parametrize("at_once", [40, 160, 10_000])
def test_it_is_the_mean_over_real_tokens_whatever_the_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once)
    states, head, input_ids = given()
    found, tokens = next_token_loss(states, head, input_ids, LENGTHS)
    assert tokens == 9
    labels = input_ids.clone()
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = -100
    logits = head(states)
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(found, expected)
    parameters = (states, head.weight, head.bias)
    for each in zip(*(torch.autograd.grad(loss, parameters) for loss in (found, expected)), strict=True):
        assert_close(*each)


def test_logits_are_not_kept() -> None:
    states, head, input_ids = given()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        next_token_loss(states, head, input_ids, LENGTHS)
    assert kept
    assert all(40 not in shape or shape == head.weight.shape or shape == head.bias.shape for shape in kept)


def test_bfloat16_logits_are_judged_in_float32() -> None:
    states, head, input_ids = given()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = next_token_loss(states, head, input_ids, LENGTHS)
    assert found.dtype == torch.float32
    assert_close(found, next_token_loss(states, head, input_ids, LENGTHS)[0], rtol=0.01, atol=0.0)


def test_nothing_to_predict_is_refused() -> None:
    states, head, input_ids = given()
    with pytest.raises(UserError, match="None of the 3 documents of a batch has two tokens"):
        next_token_loss(states, head, input_ids, (1, 1, 1))
