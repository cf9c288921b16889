"""What a computation takes, counted while it runs on fake tensors: bytes alive, operations, launches, bytes sent.

Floats are fake (shapes alone, no memory, no arithmetic), integers are real: masks, lengths and places are what they
would be, so the code that is counted runs as it stands. By PyTorch's ``FakeTensorMode``, entered for what makes floats
of nothing alone, and its table of formulas for floating-point operations.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

_NO_LAUNCH = {"detach", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all that is computed while it is entered.

    ``alive``: bytes of the storages that are held; ``peak``: the most since ``mark``; ``flops``; ``launches``: of
    kernels, views apart; ``sent``: bytes given to collectives. ``fake``: None counts real tensors.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.alive = self.peak = self.flops = self.launches = self.sent = 0
        self._held: dict[int, int] = {}

    def hold(self, tensor: Any) -> None:
        """Counts the tensor's storage, until nothing holds it."""
        if not isinstance(tensor, Tensor) or hasattr(tensor, "_local_tensor"):  # what a DTensor wraps is seen by itself
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._held[key] = storage.nbytes()
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.alive -= self._held.pop(key, 0)

    def mark(self) -> int:
        """The peak since the last call."""
        found, self.peak = self.peak, self.alive
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._computed(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self._send(name, [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)])
        elif func.namespace == "aten" and not func.is_view and name not in _NO_LAUNCH:
            self.launches += 1
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **kwargs, out_val=out)
        for each in tree_leaves(out):
            self.hold(each)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.fake is None:
            return func(*args, **kwargs)
        if func.namespace == "aten" and not any(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))):
            with self.fake:
                out = func(*args, **kwargs)
            return out if isinstance(out, Tensor) and out.is_floating_point() else func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except _UNKNOWN:  # how many numbers there are, or which, depends on fake ones: as if all of those were ones
            return func(*tree_map(_ones, args), **tree_map(_ones, kwargs))

    def _send(self, name: str, tensors: list[Tensor]) -> None:
        """Other ranks hold rows like this one's, but for keys of texts, which differ."""
        self.sent += (2 if "allreduce" in name else 1) * max(each.nbytes for each in tensors)  # a ring adds up, tells
        own = min(tensors, key=Tensor.numel)
        for gathered in tensors if "gather" in name and not isinstance(own, FakeTensor) else []:
            if gathered is not own:
                for rank, rows in enumerate(gathered.view(-1, *own.shape)):
                    rows.copy_(torch.where(own.abs() > 1 << 32, own + rank, own))


def _ones(value: Any) -> Any:
    return torch.ones(value.shape, dtype=value.dtype) if isinstance(value, FakeTensor) else value


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Attention by the memory-efficient kernel of GPUs, which keeps as much as flash attention does.

    For the whole process, as ``fastest_attention``.
    """
    by_default = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = by_default


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    tensors = [query, key, value]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        tensors = [each.to(dtype) if each.dtype == torch.float32 else each for each in tensors]
    q, k, v = tensors
    with torch.autocast("cpu", enabled=False):
        if enable_gqa:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        if attn_mask is not None:
            bias = torch.where(attn_mask, 0.0, -torch.inf) if attn_mask.dtype == torch.bool else attn_mask
            attn_mask = bias.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return cast(Tensor, efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0])
