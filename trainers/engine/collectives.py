"""What ranks do together, and the one place that says how their gradients become one.

A step's loss is the mean over its stored batches. Every rank backpropagates its own share of that mean, *already
divided by the number of pieces in the whole step*, and ``GradientSum`` adds the shares up. Nothing is averaged over
ranks and no other code multiplies by a world size. So one process with twice the batches and two processes get the same
gradients. ``DistributedDataParallel`` would divide by the world size. Communication hides behind the last backward
pass, with a gradient cache behind its last chunk: no gradient is complete earlier.

Without a process group every function here is the identity of a single rank.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from raytriever.errors import StorageError, UserError
from trainers.engine.optimization import trainable_parameters

_BUCKET_BYTES = 64 << 20
_RANKS_NAMED = 8
_PATIENCE = timedelta(minutes=30)  # with other ranks, as Ray Train gives the default group
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # before torch 2.13
_MUST_AGREE = {
    "batches": "Give all machines the same batches: one folder that they share, or copies with one fingerprint.",
    "steps": "Give all ranks the same settings.",
    "trainable parameters": "Give all machines the same model and settings.",
    "torch": "Install one version of torch on all machines.",
}


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in ``group`` (None: the default group)."""
    return dist.get_world_size(group) if is_distributed() else 1


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's place in ``group`` (None: the default group)."""
    return dist.get_rank(group) if is_distributed() else 0


def neighbours(size: int) -> dist.ProcessGroup | None:
    """The group of ``size`` consecutive ranks that this one belongs to; None for a group of one.

    ``size`` divides the world size, and all ranks call it together.
    """
    if size == 1:
        return None
    if size == world_size():
        return dist.group.WORLD
    mine: dist.ProcessGroup = dist.new_subgroups(size)[0]  # type: ignore[no-untyped-call]
    return mine


def exchange(numbers: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every rank's ``numbers``, as many on each, by rank; all ranks call it, and wait for what the device has to do."""
    if world_size(group) == 1 or not numbers:
        return [[*numbers]]
    everyones: list[list[int]] = _all_gather(torch.tensor([numbers], device=device), group).tolist()
    return everyones


def gather(tensor: Tensor, group: dist.ProcessGroup | None = None, counts: Sequence[int] | None = None) -> Tensor:
    """The rows of all ranks in rank order: (rows of all ranks, …) from (own rows, …); row counts may differ.

    ``counts``: the rows of every rank. None: the ranks ``exchange`` them. Differentiable: the gradients of all ranks'
    losses for a row are summed and given to the row's owner. All ranks call it together. If one of them needs the
    backward pass, all do. So give it a tensor that requires a gradient on every rank or on none.
    """
    if world_size(group) == 1:
        return tensor
    if counts is None:
        counts = [count for (count,) in exchange([len(tensor)], tensor.device, group)]
    gathered: Tensor = _Gather.apply(tensor, counts, group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        longest = max(counts)
        if min(counts) == longest:
            return _all_gather(tensor.contiguous(), group)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        blocks = torch.split(_all_gather(padded, group), longest)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        place = rank(ctx.group)
        start = sum(ctx.counts[:place])
        return total[start : start + ctx.counts[place]], None, None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    gathered = tensor.new_empty(len(tensor) * world_size(group), *tensor.shape[1:])
    _all_gather_single(gathered, tensor, group=group)
    return gathered


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """The sum of every rank's ``tensor`` (equal shapes); not differentiable."""
    total = tensor.detach().clone()
    if is_distributed():
        dist.all_reduce(total)
    return total


class GradientSum:
    """Replaces every ``.grad`` by its sum over the ranks where its ``with`` block ends.

    ``start`` it within, before the step's last backward pass. Complete gradients are sent while that runs, the last
    parameters first. The order is fixed and the process group its own, because ranks may send other things at different
    times. ``dtype``: of what is sent and summed. None: as the gradients are.

    ``parameters`` come in the same order on every rank. A parameter that only some ranks used counts as zero on the
    others. One that no rank used keeps no gradient, as in a single process. Sharded parameters are left alone, because
    their backward pass has summed them already (``trainers.engine.sharding``).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        whole = [each for each in parameters if each.requires_grad and not isinstance(each, DTensor)]
        self._parameters = whole[::-1] if world_size() > 1 else []
        self._dtype = dtype
        # made here, which all ranks reach together
        self._group = _group_of_gradients(dist.group.WORLD) if self._parameters else None
        self._unsent = _buckets(self._parameters)
        self._complete = set[Tensor]()
        self._parts: list[Tensor] = []
        self._used: list[bool] = []
        self._under_way: list[dist.Work | None] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """From here on a gradient is complete as soon as the backward pass has added to it."""
        for parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _completed(self, parameter: Tensor) -> None:
        if parameter in self._complete:
            raise RuntimeError("A gradient was added to twice in a backward pass, and may have been sent in between.")
        self._complete.add(parameter)
        while self._unsent and self._complete.issuperset(self._unsent[0]):
            self._send()

    def _send(self) -> None:
        bucket = self._unsent.popleft()
        sizes = [parameter.numel() for parameter in bucket]
        flat = torch.empty(sum(sizes), dtype=self._dtype or bucket[0].dtype, device=bucket[0].device)
        for parameter, part in zip(bucket, torch.split(flat, sizes), strict=True):
            self._used.append(parameter.grad is not None)
            self._parts.append(part.zero_() if parameter.grad is None else part.copy_(parameter.grad.reshape(-1)))
            parameter.grad = None  # there is room for one of both
        self._under_way.append(dist.all_reduce(flat, group=self._group, async_op=True))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind or not self._parameters:
            return
        while self._unsent:
            self._send()
        used = torch.tensor(self._used, dtype=torch.int32, device=self._parameters[0].device)
        for work in self._under_way:
            if work:
                work.wait()
        anywhere = sum_across_ranks(used).tolist()
        for parameter, part, ranks in zip(self._parameters, self._parts, anywhere, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if ranks else None


def _buckets(parameters: Sequence[nn.Parameter]) -> deque[list[nn.Parameter]]:
    """Consecutive ones of one type and of ``_BUCKET_BYTES`` together; a larger one is alone."""
    buckets = deque[list[nn.Parameter]]()
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if not buckets or size > _BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = parameter.nbytes
        buckets[-1].append(parameter)
    return buckets


@lru_cache(maxsize=1)
def _group_of_gradients(world: dist.ProcessGroup) -> Any:  # noqa: ARG001  # another one, another group
    return dist.new_group(timeout=_PATIENCE)


def broadcast_weights(module: nn.Module) -> None:
    """Gives every rank the first rank's trainable weights and buffers; not those that are shared out over the ranks."""
    if world_size() == 1:
        return
    whole = (parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
    trainable = [parameter.detach() for parameter in whole if parameter.requires_grad]
    for tensor in [*trainable, *module.buffers()]:
        dist.broadcast(tensor, src=0)


def barrier() -> None:
    """Waits for all ranks."""
    if is_distributed():
        dist.barrier()


def check_ranks_agree(module: nn.Module, batches: str, steps: int) -> None:
    """Raises ``UserError`` on every rank if ranks differ in what training needs to be equal, naming who has what.

    All ranks call it before the first step, because later a difference could not be named. ``batches``: their
    fingerprint. ``steps``: of the whole run. The trainable parameters and the version of torch are compared too.
    """
    named = trainable_parameters(module)
    device = next(iter(named.values())).device
    size = sum(parameter.numel() for parameter in named.values())
    facts = {
        "batches": batches[:12],
        "steps": f"{steps:,}",
        "trainable parameters": f"{size:,} in {len(named):,} tensors",
        "torch": torch.__version__,
    }
    of_ranks: list[dict[str, str]] = [json.loads(line) for line in gather_lines(json.dumps(facts), device)]
    for name, remedy in _MUST_AGREE.items():
        values = [of_rank[name] for of_rank in of_ranks]
        if len(set(values)) > 1:
            said = "; ".join(f"{value} on rank {rank}" for rank, value in list(enumerate(values))[:_RANKS_NAMED])
            raise UserError(f"The ranks differ in {name}: {said}. {remedy}")


def raise_together(problems: Sequence[str], device: torch.device) -> None:
    """Raises a ``UserError`` on every rank where one of them has a problem: the first of the first such rank.

    All ranks call it; a rank that raised alone would leave the others waiting for it.
    """
    for problem in gather_lines(" ".join(problems[0].split()) if problems else "", device):
        if problem:
            raise UserError(problem)


@contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Around what only some ranks do: a ``UserError`` in it is raised on every rank. All ranks enter it together.

    A ``StorageError`` is left to its rank: another attempt may do better, and whoever starts the ranks tries it.
    """
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        raise_together([str(error)], device)
    else:
        raise_together([], device)


def gather_lines(line: str, device: torch.device) -> list[str]:
    """Every rank's line of text, by rank; all ranks call it. As bytes: pickled objects are nothing to receive."""
    encoded = f"{line}\n".encode(errors="backslashreplace")
    sent = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    return bytes(gather(sent).tolist()).decode().split("\n")[:-1]
