"""What a processor computes fastest with: the attention kernel. Measured by ``benchmarks.attention``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Tokens up to which a CPU computes attention's backward pass faster by matrix products than by PyTorch's flash kernel.
# In bfloat16 that kernel takes 7 times as long at 32 tokens, 3 at 128, as long at 512; beyond, and in float32, it wins.
# Only as many keep the products' memory, which grows with the square of a text, small.
_PRODUCTS_UP_TO = 512


def wants_products(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> bool:
    """Whether attention of heads (…, length, width) is computed faster by plain matrix products on their processor."""
    of_autocast = torch.is_autocast_enabled("cpu")
    return (
        query.device.type == "cpu"
        and (torch.get_autocast_dtype("cpu") if of_autocast else query.dtype) == torch.bfloat16
        and max(query.shape[-2], key.shape[-2]) <= _PRODUCTS_UP_TO
        and torch.is_grad_enabled()
        and any(heads.requires_grad for heads in (query, key, value))
    )


class FastestAttention(TorchFunctionMode):
    """Has ``scaled_dot_product_attention`` compute by the kernel that is the fastest on its processor.

    Of whatever model calls it, also where the backward pass computes activations again. Only PyTorch's choice among its
    own kernels changes: attention that a model computes otherwise stays as it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``func``, attention with the kernel that it wants."""
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention and wants_products(*args, **given):
            return _by_products(*args, **given)
        return func(*args, **given)


def _by_products(*args: Any, **given: Any) -> Tensor:
    """Attention by matrix products in bfloat16; PyTorch by itself would compute them in float32, twice as slowly."""
    in_float32 = not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(*args, **given)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not in_float32)
