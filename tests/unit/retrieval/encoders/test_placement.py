"""Models in bfloat16: weights are rounded, tables of rotary positions are not."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from retrieval.encoders.structure import place_module
from tests.unit.retrieval.encoders.tiny_models import ARCHITECTURES

ROTARY = ("llama", "qwen2", "smollm2", "qwen3", "gemma3", "modernbert", "nomic_bert")
SHARPNESS = 0.5  # of attention: standard deviation of its weights


def model_of(name: str) -> Any:
    """Two layers whose attention looks at few tokens, as trained attention does."""
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(
        **architecture.settings | {"max_position_embeddings": 2048, "_attn_implementation": "eager"}
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 2 and "att" in key:
                weight.normal_(std=SHARPNESS)
            elif key.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(4.0)  # which else undo it
    return model


def distance(model: nn.Module, other: nn.Module, length: int) -> float:
    """Mean of 1 - cosine of the token states of one text."""
    tokens = torch.randint(5, 300, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        states, others = (each(input_ids=tokens).last_hidden_state[0].double() for each in (model, other))
    return float((1 - nn.functional.cosine_similarity(states, others, dim=-1)).mean())


@pytest.mark.parametrize("name", ROTARY)
def test_positions_keep_their_precision(name: str) -> None:
    exact = model_of(name)
    placed, cast = copy.deepcopy(exact), copy.deepcopy(exact).to(torch.bfloat16)
    place_module(placed, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in placed.parameters()} == {torch.bfloat16}
    tables = {key: table for key, table in placed.named_buffers() if table.is_floating_point()}
    assert any("inv_freq" in key for key in tables)
    assert all(table.equal(exact.get_buffer(key)) for key, table in tables.items())
    of_weights = [distance(exact, placed, length) for length in (128, 512, 2048)]
    of_all = [distance(exact, cast, length) for length in (128, 512, 2048)]
    assert max(of_weights) < 0.05, of_weights
    assert of_all[2] > 2 * of_weights[2], (of_weights, of_all)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ROTARY])
def test_weights_of_other_families_are_all_that_counts(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = transformers.AutoModel.from_config(getattr(transformers, architecture.config)(**architecture.settings))
    place_module(model, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not [key for key, table in model.named_buffers() if table.is_floating_point() and table.numel() > 1]
