"""The one place that runs a transformer on right-padded texts: with the mask that it needs, if any.

Given a 2D mask, transformers asks whether it masks anything, and on a GPU the host waits for the answer in every pass.
Here that is known before the texts get there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrieval.encoders.structure import has_own_code, is_causal

FULL = "full"
"""Among a batch's features, a tensor without numbers (n, 0): none of its texts is padded."""

# families whose layers take a mask as it is, all of them that of a whole text
_BIDIRECTIONAL = {"bert", "camembert", "distilbert", "mpnet", "mt5", "nomic_bert", "roberta", "t5", "xlm-roberta"}


def mark_full(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """``features`` with ``FULL``, of texts (n, length) that are equally long."""
    return features | {FULL: features["input_ids"][:, :0]}


def last_states(transformer: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states (n, length, width) of ``input_ids`` int64 (n, length), padded on the right.

    Those of padding mean nothing. ``features`` has an ``attention_mask`` (n, length), and ``FULL`` where that is known.
    """
    mask = _mask(transformer, features)
    states: Tensor = transformer(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
    return states


def _mask(transformer: nn.Module, features: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor] | None:
    """None, where attention is causal too: no token reads the padding behind it. Else who is seen, (n, 1, 1, length).

    Of families with windows one for each kind of layer. Models by their own code, and kernels that want another, get a
    2D one.
    """
    config: Any = transformer.config
    mask = features["attention_mask"]
    if has_own_code(transformer):
        return mask
    window = _window(config)
    # without a mask Gemma asks whether texts are packed, once for each kind of layer
    if (FULL in features and config.model_type != "gemma3_text") or is_causal(transformer):
        return None
    kernel = config._attn_implementation
    if kernel not in ("sdpa", "eager") or (window is None and config.model_type not in _BIDIRECTIONAL):
        return mask
    seen = mask.bool()[:, None, None]
    masks = {"full_attention": seen}
    if window is not None:
        places = torch.arange(mask.shape[1], device=mask.device)
        distance = (places[:, None] - places).abs()
        # padding reads something too: itself
        masks["sliding_attention"] = seen & (distance <= window) | (distance == 0)
    if kernel == "eager":  # the mask is added to scores
        dtype = next(transformer.parameters()).dtype
        lowest = torch.finfo(dtype).min
        masks = {name: (~each).to(dtype) * lowest for name, each in masks.items()}
    return masks["full_attention"] if window is None else masks


def _window(config: Any) -> int | None:
    """How far tokens read in both directions in layers with a window. None for a family without windows."""
    if config.model_type == "gemma3_text" and config.use_bidirectional_attention:  # EmbeddingGemma
        return int(config.sliding_window) - 1
    return int(config.sliding_window) if config.model_type == "modernbert" else None
