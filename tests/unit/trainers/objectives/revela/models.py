"""Small language models of several families with random weights, and what makes one compute in float64."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from trainers.objectives.revela.language_model import InBatchLanguageModel

VOCABULARY = 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def causal_model(model_type: str = "llama", seed: int = 0, **settings: Any) -> nn.Module:
    """In evaluation mode; weights are larger than fresh ones, so that attention is not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(lengths: tuple[int, ...] = (9, 4, 7, 1, 6), seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random token ids and mask, (B, longest), and Sim (B, B)."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    logits = torch.randn(len(lengths), len(lengths), generator=generator).fill_diagonal_(-torch.inf)
    return input_ids * mask, mask, logits.softmax(dim=1)


def in_float64(model: InBatchLanguageModel) -> InBatchLanguageModel:
    """``model`` itself, whose norms and rotation compute in float32 whatever they are given, but for this."""
    model.double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_norm, module)  # type: ignore[method-assign]
    model.rotation.forward = functools.partial(_rotation, model.rotation)  # type: ignore[method-assign]
    return model


def _norm(module: Any, states: Tensor) -> Tensor:
    scale = torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + module.variance_epsilon)
    result: Tensor = module.weight * states * scale
    return result


def _rotation(module: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    config = module.config
    dimension = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rates = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dimension, 2, dtype=states.dtype) / dimension)
    angles = (positions[..., None] * rates).repeat(1, 1, 2)
    return angles.cos(), angles.sin()
