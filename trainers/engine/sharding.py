"""Transformers with weights, gradients and optimizer states sharded over the ranks (FSDP2).

Every block is one unit. Its weights are gathered just before it runs, and freed afterwards or at the end of the step.
Its gradient is summed over the ranks, and each rank keeps its own part. Parameters outside the transformers (a head,
scalar weights) are small and stay whole on every rank, where ``collectives.GradientSum`` sums them.

A unit communicates in every forward and backward pass, so all ranks must make the same number of passes. In training
``equal_passes`` ensures that. Elsewhere ``whole_weights`` removes the communication.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from raytriever.errors import UserError
from retrieval.encoders.structure import ShardedUnit, linear_parameters, outermost_transformers, transformer_blocks
from trainers.engine import collectives
from trainers.engine.gradient_cache import Chunks
from trainers.objective import map_nest

Batch = TypeVar("Batch")

_RESHARDS = "_reshards_after_forward"


def shard(module: nn.Module, *, bf16: bool = False, whole_in_step: bool = False) -> None:
    """Shards every transformer in ``module``, in place. Does nothing without a process group.

    ``bf16``: whether it runs only under bfloat16 autocast. Blocks then gather the weights of their linear layers as
    autocast would round them. This halves the bytes, and avoids a copy in each pass. Their other weights
    (normalisations, biases of positions) are few and stay whole in float32. Gradients are summed in float32, over
    chunks and ranks.

    ``whole_in_step``: weights are gathered once a step and kept until ``end_step``, not for each pass. This is ZeRO-2
    (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").

    All ranks call it together, with the module on its device and before the optimizer is built. They start from the
    first rank's trainable weights. Gradients are summed over the ranks, never averaged. Raises ``UserError`` where
    there is no transformer with a list of blocks, and for an older torch.
    """
    if not collectives.is_distributed():
        return
    if torch.__version__ < "2.11":  # where a cached chunk is encoded again, blocks that were given up stay so
        raise UserError(
            f"Sharding needs torch 2.11 or later, and torch {torch.__version__} is installed: earlier ones lose a"
            " block's weights between the passes of a step. Upgrade torch, or train without sharding."
        )
    collectives.broadcast_weights(module)
    mesh = init_device_mesh(next(module.parameters()).device.type, (collectives.world_size(),))
    for transformer in outermost_transformers(module):
        rounded = {id(parameter) for parameter in linear_parameters(transformer)} if bf16 else set()
        for unit in (*transformer_blocks(transformer), transformer):
            reshards = unit is not transformer and not whole_in_step
            policy, ignored = MixedPrecisionPolicy(), None
            if bf16 and unit is not transformer:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
                ignored = {parameter for parameter in unit.parameters() if id(parameter) not in rounded}
            sharded = fully_shard(
                unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, ignored_params=ignored
            )
            vars(sharded)[_RESHARDS] = reshards
            sharded.set_reshard_after_backward(not whole_in_step, recurse=False)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend has
            if ignored is not None:
                _add_up_in_float32(sharded)
        for entrance in transformer.entrances if isinstance(transformer, ShardedUnit) else ():
            register_fsdp_forward_method(transformer, entrance)


def _add_up_in_float32(unit: FSDPModule) -> None:
    """The gradients of a step's passes; by itself torch adds them up in the gathered weights' precision."""
    unit.unshard()
    for parameter in cast(nn.Module, unit).parameters():
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    unit.reshard()


def end_step(module: nn.Module) -> None:
    """Gives up the weights that were gathered for a step, after its last backward pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Whether ``shard`` shared out anything in ``module``."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is shared out; any other tensor as it is. All ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` (whole, of the parameter's shape, equal on all ranks) on its device, shared out as it is."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gather_weights(module: nn.Module) -> None:
    """Puts whole weights on the first rank's CPU in place of what is shared out; nothing can be trained afterwards.

    For the export; all ranks call it together.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                places.setdefault(parameter, []).append((owner, name))
    for parameter, owners in places.items():
        tensor = whole(parameter.detach())
        if collectives.rank() == 0:
            gathered = nn.Parameter(tensor.cpu(), parameter.requires_grad)
            for owner, name in owners:
                owner.register_parameter(name, gathered)


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """All weights in ``module`` are whole on every rank while it lasts, and encoding needs no communication.

    For validation: ranks may encode different numbers of texts, or one of them alone. All ranks enter and leave
    together.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(vars(unit)[_RESHARDS], recurse=False)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None) -> Tensor:
    """Scales the gradients of all ranks down to a global norm of ``limit``; returns the norm before, equal on all."""
    gradients = [_with_one_part(parameter) for parameter in parameters if parameter.grad is not None]
    shared_out = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not shared_out and not any(gradient.is_sparse for gradient in gradients):
        total: Tensor = clip_grad_norm_(parameters, torch.inf if limit is None else limit)
        return total
    whole_ones = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    local = [gradient.values() if gradient.is_sparse else gradient for gradient in whole_ones]
    norms = [whole(get_total_norm(part)) for part in (shared_out, local) if part]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if limit is not None:
        coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch's own function has it
        for gradient in (*(gradient.to_local() for gradient in shared_out), *local):
            gradient.mul_(coefficient)
    return norm


def _with_one_part(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient. A sparse one gets one part a row, not one for queries and another for documents."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
    return parameter.grad


def equal_passes(batch: Batch, device: torch.device) -> Batch:
    """``batch`` (a nest as ``Objective.collate`` returns) with equally many chunks on all ranks.

    Ranks have different numbers of distinct texts. One with fewer chunks than another encodes a text again, and nothing
    reads the vector. All ranks call it together.
    """
    found: list[int] = []

    def count(chunks: Chunks) -> Chunks:
        found.append(len(chunks.chunks))
        return chunks

    map_nest(batch, Chunks, count)
    wanted = map(max, zip(*collectives.exchange(found, device), strict=True))
    return cast(Batch, map_nest(batch, Chunks, lambda chunks: _with_passes(chunks, next(wanted))))


def _with_passes(chunks: Chunks, count: int) -> Chunks:
    shortest = {name: tensor[-1:] for name, tensor in chunks.chunks[-1].items()}
    return replace(chunks, chunks=chunks.chunks + (shortest,) * (count - len(chunks.chunks)))
