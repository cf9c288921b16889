"""Optimizers over the parameters that require gradients."""

from typing import Annotated, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError

Beta = Annotated[float, Field(ge=0, lt=1)]  # how much of a running mean a step keeps


class OptimizerSettings(Settings):
    """The optimizer, its peak learning rate and the limit on the gradient.

    ``kind``: those in 8 bits keep their two moments in a byte each (Dettmers et al. 2022, "8-bit Optimizers via
    Block-wise Quantization"), for weights of 4,096 numbers or more; they need the extra ``optimizers``.
    ``weight_decay`` is decoupled for adamw and radam and an L2 penalty for adam; biases, the weights of
    normalisation layers and single numbers such as a learned temperature are exempt. ``max_grad_norm``: the global
    norm that gradients are scaled down to, None for no limit.
    """

    kind: Literal["adamw", "adam", "radam", "adamw_8bit", "adam_8bit"] = "adamw"
    learning_rate: float = Field(default=2e-5, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _decay_in_8_bits_is_decoupled(self) -> Self:
        if self.kind == "adam_8bit" and self.weight_decay:
            raise ValueError("adam_8bit has no L2 penalty; set kind to 'adamw_8bit' for decoupled weight_decay")
        return self


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter, in the module's order, for all that require gradients.

    Raises ``UserError`` where none does.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not named:
        raise UserError(
            f"{type(module).__name__} has no parameter that requires a gradient: everything is frozen, so"
            " there is nothing to train. Unfreeze an encoder or give it LoRA adapters."
        )
    return named


def build_optimizer(module: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer over what requires gradients; the caller sets each step's learning rate."""
    groups = _groups(module, settings.weight_decay)
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    if settings.kind in ("adamw_8bit", "adam_8bit"):
        return _in_8_bits(groups, options)
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, **options)
    if settings.kind == "adam":
        return torch.optim.Adam(groups, **options)
    return torch.optim.RAdam(groups, **options, decoupled_weight_decay=True)


def decay_spares_scalars(module: nn.Module, settings: OptimizerSettings) -> bool:
    """Whether there is a weight decay, and a parameter of no dimension that is exempt from it.

    Such a run trained otherwise before these were exempt, so the version of its algorithm is one higher than others'.
    """
    return settings.weight_decay > 0 and any(not parameter.ndim for parameter in trainable_parameters(module).values())


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """By weight decay, and those that are shared out over ranks apart: one fused update can't mix them with others."""
    exempt = _exempt_from_decay(module)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable_parameters(module).items():
        groups.setdefault((name in exempt, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": groups[without_decay, shared_out], "weight_decay": 0.0 if without_decay else weight_decay}
        for without_decay, shared_out in sorted(groups)
    ]


def _in_8_bits(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, which without decay is its Adam. Raises ``UserError`` where it can't be had or used."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "Optimizers in 8 bits come with the package bitsandbytes, which is not installed: pip install"
            " 'raytriever[optimizers]'. Or set optimizer.kind to adamw."
        ) from error
    if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        raise UserError(
            "An optimizer in 8 bits can't update weights that are shared out over ranks: its blocks of numbers would"
            " depend on how many there are. Sharding divides the optimizer's memory by the ranks anyway: set"
            " optimizer.kind to adamw, or train without sharding."
        )
    return cast(torch.optim.Optimizer, AdamW8bit(groups, **options))


def _exempt_from_decay(module: nn.Module) -> set[str]:
    exempt = set()
    for owner_name, owner in module.named_modules():
        is_norm = "norm" in type(owner).__name__.lower()
        for name, parameter in owner.named_parameters(recurse=False):
            is_bias = name == "bias" or name.endswith("_bias")
            is_scalar = parameter.ndim == 0  # decay would pull a temperature, kept as its logarithm, towards 1
            if is_norm or is_bias or is_scalar:
                exempt.add(f"{owner_name}.{name}" if owner_name else name)
    return exempt
