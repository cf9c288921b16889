"""The one place that runs a transformer on right-padded texts: with the mask that it needs, if any.

Given a 2D mask, transformers asks whether it masks anything, and on a GPU the host waits for the answer in every pass.
Here that is known before the texts get there. And what a processor computes fastest with: the attention kernel, and how
the C library allocates, as ``benchmarks.attention`` measures.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrieval.encoders.structure import has_own_code, is_causal

FULL = "full"
"""Among a batch's features, a tensor without numbers (n, 0): none of its texts is padded."""

# families whose layers take a mask as it is, each layer the mask of a whole text
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


# How glibc allocates in a worker on CPUs; other C libraries ignore it. By itself it gives the large blocks of a step
# back to the system, which maps and zeroes every page anew in the next. So blocks come from its heaps, which are never
# trimmed.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}

# Up to so many tokens a CPU computes attention with its backward pass faster by matrix products than by PyTorch's flash
# kernel. In bfloat16 that kernel takes 5 times as long at 32 tokens, 3 at 128, 1.3 at 512; at 1,024, and in float32, it
# wins. The limit keeps the products' memory small too, which grows with the square of a text.
_PRODUCTS_UP_TO = 512


def wants_products(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> bool:
    """Whether attention of heads (…, length, width) is computed faster by matrix products on their processor."""
    of_autocast = torch.is_autocast_enabled("cpu")
    return (
        query.device.type == "cpu"
        and (torch.get_autocast_dtype("cpu") if of_autocast else query.dtype) == torch.bfloat16
        and max(query.shape[-2], key.shape[-2]) <= _PRODUCTS_UP_TO
        and torch.is_grad_enabled()
        and any(heads.requires_grad for heads in (query, key, value))
    )


@contextmanager
def fastest_attention() -> Iterator[None]:
    """Has ``scaled_dot_product_attention`` compute by the kernel that is the fastest on its processor.

    It does so for whatever model calls it, also where the backward pass computes activations again: a
    ``TorchFunctionMode`` would not reach those. Attention that a model computes otherwise stays as it is. It holds for
    the whole process: nobody else trains in it.
    """
    by_default = functional.scaled_dot_product_attention

    def attend(*args: Any, **given: Any) -> Tensor:
        if not wants_products(*args, **given):
            return by_default(*args, **given)
        with sdpa_kernel(SDPBackend.MATH):
            return by_default(*args, **given)

    functional.scaled_dot_product_attention = attend
    try:
        with in_bfloat16():
            yield
    finally:
        functional.scaled_dot_product_attention = by_default


@contextmanager
def in_bfloat16(*, allowed: bool = True) -> Iterator[None]:
    """The matrix products of bfloat16 heads are computed in bfloat16; by default in float32, which is half as fast."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
