"""The decoder families that in-batch attention works in, and how one of their layers is read.

All of them are built alike and keep the names of the parts in transformers, so one reading serves all: normalise,
project to queries, keys and values (Qwen3 normalises the first two once more), rotate, attend, project; normalise, feed
forward. Another family may scale, clip or rotate elsewhere, so one that isn't listed is refused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.retrieval.errors import UserError

FAMILIES = {
    "llama": "Llama 1 to 3, SmolLM 1 and 2, TinyLlama",
    "mistral": "Mistral without a sliding window",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
}
"""``model_type`` in config.json, and what goes by it."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position: (1, L, D) each."""


@dataclass(frozen=True)
class DecoderParts:
    """The modules of a causal language model; ``head`` gives the logits."""

    embeddings: nn.Module
    layers: tuple[nn.Module, ...]
    norm: nn.Module
    rotation: nn.Module
    head: nn.Module


def decoder_parts(model: nn.Module) -> DecoderParts:
    """Of a Hugging Face causal language model.

    Raises ``UserError`` for one that is of none of ``FAMILIES``, has a sliding window, or has no head.
    """
    _require_family(model)
    causal: Any = model
    head = causal.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{type(model).__name__} has no language-modelling head, so it predicts no token. Load a causal language"
            " model (AutoModelForCausalLM)."
        )
    decoder = causal.get_decoder()
    return DecoderParts(decoder.embed_tokens, tuple(decoder.layers), decoder.norm, decoder.rotary_emb, head)


def _require_family(model: Any) -> None:
    config, where = model.config, getattr(model, "name_or_path", "") or type(model).__name__
    if config.model_type not in FAMILIES:
        known = "; ".join(f"{name} ({what})" for name, what in FAMILIES.items())
        raise UserError(
            f"The language model {where} is of the family {config.model_type!r}, in which in-batch attention is not"
            f" supported. It is in these families of decoders with rotary positions: {known}. Choose a language model"
            " of one of them."
        )
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type == "mistral"
    if windowed and window is not None:
        raise UserError(
            f"The language model {where} attends within a sliding window of {window} tokens, and in-batch attention"
            " reads whole documents. Where all texts are shorter the window changes nothing: set sliding_window in its"
            " config.json to null (for Qwen use_sliding_window to false). Else choose another language model."
        )


def project_queries(attention: Any, states: Tensor, rotation: Rotation) -> Tensor:
    """Queries (n, H, L, D) of an attention module from its input (n, L, d)."""
    return _rotated(_heads(attention, "q", states), rotation)


def project_keys_values(attention: Any, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Keys and values, (n, K, L, D) each, of an attention module from its input (n, L, d)."""
    return _rotated(_heads(attention, "k", states), rotation), _heads(attention, "v", states)


def _heads(attention: Any, name: str, states: Tensor) -> Tensor:
    projected: Tensor = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return (projected if norm is None else norm(projected).to(projected.dtype)).transpose(1, 2)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding (Su et al. 2021, "RoFormer"): the halves of (n, heads, L, D) are the pairs' parts.

    In the dtype of the heads, as a kernel under autocast would read them.
    """
    cosines, sines = (each.unsqueeze(1) for each in rotation)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)
