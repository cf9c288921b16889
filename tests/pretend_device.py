"""A pretend accelerator: it computes on the CPU, and keeps host and device as far apart as a GPU does.

What is on the device meets nothing that is on the host (``DeviceMistake``); the device draws from a generator of its
own; where the host would wait for the device, ``counted_waits`` has the line that makes it wait; autocast casts as for
CUDA. It is no concern of this device how long anything takes, which kernels run, and what runs at the same time.

Importing this module registers the device with torch, for good: do it in a process that runs no other tests. It stands
on an interface that torch calls experimental.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_ROOT = f"{Path(__file__).parents[1]}/"
# results whose size, or whose value, the host asks for
_WAIT = {
    "_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select",
    "bincount", "equal",
}  # fmt: skip
_RANDOM = {
    "native_dropout", "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randperm",
    "uniform_", "normal_", "multinomial", "random_", "exponential_", "_scaled_dot_product_attention_math",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with indices that may be on the host
_BFLOAT16 = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
_FLOAT32 = (
    "layer_norm", "native_layer_norm", "rms_norm", "softmax.int", "log_softmax.int", "nll_loss", "mse_loss", "exp",
    "log", "log1p", "reciprocal", "rsqrt", "softplus", "logsumexp", "sum", "sum.dim_IntList", "prod", "cumsum",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "cosine_similarity",
)  # fmt: skip

_generator = torch.Generator().manual_seed(0)
_drawing = threading.Lock()
_waits: Counter[str] = Counter()


class DeviceMistake(RuntimeError):
    """A tensor on the host in an operation of the device."""


class _Module:
    """What torch asks of ``torch.pretend``."""

    _initialized = True
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    device = staticmethod(nullcontext)
    manual_seed = manual_seed_all = staticmethod(_generator.manual_seed)
    get_rng_state = staticmethod(lambda *_: _generator.get_state())
    set_rng_state = staticmethod(lambda state, *_: _generator.set_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16, torch.float32])


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """How often the host waits for the device inside, by line of the source and what it waits for."""
    global _waits
    _waits = counted = Counter[str]()
    yield counted
    _waits = Counter()


def _wait(reason: str) -> None:
    frame, through = sys._getframe(1), ""
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        name = frame.f_code.co_filename
        if not through and "/transformers/" in name:
            through = f" through transformers/{name.rsplit('/transformers/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    where = f"{frame.f_code.co_filename.removeprefix(_ROOT)}:{frame.f_lineno}" if frame else "elsewhere"
    _waits[f"{where} {reason}{through}"] += 1


def _is_ours(file: str) -> bool:
    return file.startswith(_ROOT) and file != __file__ and "site-packages" not in file


class PretendTensor(Tensor):
    """A tensor on the device; ``inner`` is its content on the CPU, for the device and for tests."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendTensor":
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            tensor: PretendTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        tensor.inner = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.inner})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number is a tensor on the host, as for CUDA: copied into one place, filled into several."""
        is_number = isinstance(value, bool | int | float)
        super().__setitem__(index, torch.tensor(value, dtype=self.dtype) if is_number else value)

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor on the pretend device is no array; copy it to the host first")


def _tensors(*values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _wrap(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, Tensor) and not isinstance(value, PretendTensor) else value


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, PretendTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func._schema.name.removeprefix("aten::"), _named_device(args, kwargs)
    tensors = _tensors(args, kwargs)
    on_device = any(isinstance(tensor, PretendTensor) for tensor in tensors)
    goes_there = on_device if device is None else device.type == NAME
    if name == "to":  # comes whole in inference mode alone
        with Placement():
            return func.decompose(*args, **kwargs)
    if name == "_to_copy":
        return _converted(func, args[0], kwargs, goes_there)
    if name == "copy_":
        return _copied(*args[:2], non_blocking=bool(args[2:] and args[2]) or bool(kwargs.get("non_blocking")))
    if on_device:
        _check_places(name, tensors)
        _note_waits(name, args, kwargs)
    inner_args, inner_kwargs = tree_map(_unwrap, (args, kwargs))
    if goes_there and "device" in kwargs:
        inner_kwargs["device"] = torch.device("cpu")
    with _own_generator() if goes_there and name in _RANDOM else nullcontext():
        result = func(*inner_args, **inner_kwargs)
    if not goes_there:
        return result
    written = next((r for r in func._schema.returns if r.alias_info is not None and r.alias_info.is_write), None)
    if written is None:
        return tree_map(_wrap, result)
    target = kwargs.get("out", args[0] if args else None)
    assert target.shape == result.shape, f"{name} changes a tensor's shape in place"
    return target


def _named_device(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    named = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
    return None if named is None else torch.device(named)


def _converted(func: Any, tensor: Tensor, kwargs: dict[str, Any], goes_there: bool) -> Tensor:
    result = func(_unwrap(tensor), **{k: v for k, v in kwargs.items() if k in ("dtype", "layout", "memory_format")})
    if isinstance(tensor, PretendTensor) and not goes_there:
        _wait("download")
    if not isinstance(tensor, PretendTensor):
        _note_upload(tensor, bool(kwargs.get("non_blocking")))
    return PretendTensor(result) if goes_there else result


def _copied(target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
    if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor):
        _note_upload(source, non_blocking)
    elif isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
        _wait("download")
    _unwrap(target).copy_(_unwrap(source))
    return target


def _note_upload(source: Tensor, non_blocking: bool) -> None:
    if not (non_blocking and source.is_pinned()):
        _wait("upload")


def _check_places(name: str, tensors: list[Tensor]) -> None:
    """Numbers may come from the host, as tensors without a dimension; so may indices, which are uploaded."""
    strangers = [t for t in tensors if not isinstance(t, PretendTensor) and t.dim() > 0]
    if strangers and name in _INDEXING:
        _wait("upload of indices")
    elif strangers:
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in strangers)
        raise DeviceMistake(f"{name} on {DEVICE} is given a tensor on the host: {shapes}")


def _note_waits(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    if name in _WAIT:
        _wait({"_local_scalar_dense": "a number", "_unique2": "unique"}.get(name, name))
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        _wait(name)
    if name in _INDEXING:
        by_mask = any(index.dtype == torch.bool for index in _tensors(args[1]))
        is_number = name != "index" and not isinstance(args[2], PretendTensor)
        if by_mask != is_number:  # a number is filled in where a mask says so
            _wait("indexing by a mask" if by_mask else "upload of a number")


@contextmanager
def _own_generator() -> Iterator[None]:
    with _drawing:
        state = torch.get_rng_state()
        torch.set_rng_state(_generator.get_state())
        try:
            yield
        finally:
            _generator.set_state(torch.get_rng_state())
            torch.set_rng_state(state)


class Placement(TorchDispatchMode):
    """In which tensors can be made on the device, and moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _named_device(args, kwargs)
        is_there = any(isinstance(each, PretendTensor) for each in _tensors(args, kwargs))
        is_there = is_there or (device is not None and device.type == NAME)
        return _run(func, args, kwargs) if is_there else func(*args, **kwargs)


def _register_kernels() -> tuple[torch.library.Library, ...]:
    """Of what torch asks for beneath its modes (``torch.tensor`` of a list), and of autocast; they last with these."""
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(torch.empty_strided(size, stride, dtype=dtype))

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(torch.empty(size, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copied(target, source, non_blocking=non_blocking)

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    for names, dtype in ((_BFLOAT16, None), (_FLOAT32, torch.float32)):
        for name in names:
            library.impl(name, _autocasting(name, dtype), "AutocastPrivateUse1")
    return library, others


def _autocasting(name: str, dtype: torch.dtype | None) -> Any:
    operation, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, operation), overload or "default")
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_cast = isinstance(value, PretendTensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype or torch.get_autocast_dtype(NAME)) if is_cast else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            args, kwargs = tree_map(cast, (args, kwargs))
            return func(*args, **kwargs)

    return kernel


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:  # noqa: ARG001
    """As ``nn.Module._apply``, by new parameters: one of another kind of tensor can't change its content in place."""
    changed: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                if id(parameter) not in changed:
                    with torch.no_grad():
                        made = nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
                    changed[id(parameter)] = made
                each._parameters[name] = changed[id(parameter)]
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else change(buffer)
    return module


def _pin(tensor: Tensor, device: Any = None) -> Tensor:  # noqa: ARG001
    pinned = tensor.clone()
    pinned._is_pinned = True  # type: ignore[attr-defined]
    return pinned


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:  # noqa: ARG001
    return getattr(tensor, "_is_pinned", False)


_libraries = _register_kernels()
nn.Module._apply = _apply  # type: ignore[assignment, method-assign]
Tensor.pin_memory = _pin  # type: ignore[assignment, method-assign]
Tensor.is_pinned = _is_pinned  # type: ignore[assignment, method-assign]
