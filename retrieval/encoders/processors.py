"""What a processor computes fastest with: the attention kernel, and how the C library allocates.

Measured by ``benchmarks.attention``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# How glibc allocates in a worker on CPUs; other C libraries ignore it. By itself it gives the large blocks of a step
# back to the system, which maps and zeroes every page anew in the next. So blocks come from its heaps, which are never
# trimmed.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}

# Tokens up to which a CPU computes attention with its backward pass faster by matrix products than by PyTorch's flash
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
