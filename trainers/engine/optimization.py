"""Optimizers over the parameters that require gradients, and the learning rate as a pure function of position."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings
from trainers.engine.early_stopping import Criterion, DecidingValue

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """The optimizer, its peak learning rate and the limit on the gradient.

    'adamw_8bit' keeps its two moments in a byte each (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
    Quantization"), for weights of 4,096 numbers or more, and needs the extra ``optimizers``; without decay it is Adam.
    """

    kind: Literal["adamw", "adam", "radam", "adamw_8bit"] = "adamw"
    """Which optimizer."""
    learning_rate: float = Field(default=2e-5, gt=0, allow_inf_nan=False)
    """At the peak of the schedule."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled, but of adam an L2 penalty; biases, normalisation layers and single numbers are exempt."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """How much of the two running means a step keeps."""
    epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the denominator of an update."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The global norm that gradients are scaled down to; None: no limit."""


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
    in_8_bits = require_package(settings)
    if in_8_bits is not None:
        if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
            raise UserError(
                "An optimizer in 8 bits can't update weights that are shared out over ranks: its blocks of numbers"
                " would depend on how many there are. Sharding divides the optimizer's memory by the ranks anyway: set"
                " training.optimizer.kind to adamw, or train without sharding."
            )
        return cast(torch.optim.Optimizer, in_8_bits.AdamW8bit(groups, **options))
    if settings.kind != "radam":
        # in one kernel: faster than the default on a CPU, and without the copy of all weights it makes on CUDA
        return (torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam)(groups, **options, fused=True)
    return torch.optim.RAdam(groups, **options, decoupled_weight_decay=True)


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


def require_package(settings: OptimizerSettings) -> Any:
    """The module of optimizers in 8 bits, None for others. Raises ``UserError`` where it isn't installed."""
    if settings.kind != "adamw_8bit":
        return None
    try:
        return import_module("bitsandbytes.optim")
    except ImportError as error:
        raise UserError(
            f"training.optimizer.kind is {settings.kind}, which comes with the package bitsandbytes, and that is not"
            " installed: pip install 'raytriever[optimizers]'. Or set it to adamw."
        ) from error


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


_BELONGS_TO = {
    "decay": ("exponential",),
    "minimum": ("linear", "plateau"),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "threshold": ("plateau",),
}


class ScheduleSettings(Settings):
    """How the learning rate moves: up in a warm-up, then level, towards zero, by a factor a step, or on a plateau."""

    kind: Literal["constant", "linear", "exponential", "plateau"] = "linear"
    """What follows the warm-up; a plateau goes by the evaluations of the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps until the peak."""
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """The same as a share of the run's steps, rounded up."""
    decay: float | None = Field(default=None, gt=0, le=1)
    """The factor a step of kind 'exponential'."""
    minimum: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak that 'linear' ends at and 'plateau' stays above."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """What 'plateau' multiplies the rate by."""
    patience: int = Field(default=3, ge=0)
    """It does after more than so many evaluations in a row without improvement."""
    threshold: float = Field(default=1e-4, ge=0)
    """An improvement is by more than this share of the best."""

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        if self.kind == "exponential" and self.decay is None:
            raise ValueError("kind 'exponential' needs decay, the factor a step (0.9999, say)")
        for name, kinds in _BELONGS_TO.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to kind {' or '.join(map(repr, kinds))}, not to {self.kind!r}")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                "warmup_steps and warmup_ratio both say how long the warm-up is: give one of them, and set the other to"
                " 0 (warmup_steps) or null (warmup_ratio)"
            )
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step depends on how many steps the run has."""
        return self.kind == "linear" or bool(self.warmup_ratio)

    def steps_of_warmup(self, total_steps: int) -> int:
        """Steps until the peak in a run of ``total_steps``."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * total_steps)


def learning_rate(
    step: int, total_steps: int, peak: float, settings: ScheduleSettings, evaluations: Sequence[DecidingValue] = ()
) -> float:
    """The rate of ``step`` (0-based) in a run of ``total_steps``.

    Warm-up: peak (step + 1) / warm-up steps, so its last step is at the peak and none is wasted at zero. After
    it, with t = step - warm-up steps: constant is peak, linear is peak (1 - (1 - minimum) t / (total_steps -
    warm-up steps)), exponential is peak decay^t, plateau is peak times ``plateau_fraction`` of those of
    ``evaluations`` (in order of their steps) that were made before the step.
    """
    warmup = settings.steps_of_warmup(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    after = step - warmup
    if settings.kind == "linear":
        return peak * (1 - (1 - settings.minimum) * after / (total_steps - warmup))
    if settings.kind == "plateau":
        past = [evaluation for evaluation in evaluations if evaluation.step <= step]
        return peak * plateau_fraction(past, warmup, settings)
    if settings.decay is not None:
        return peak * settings.decay**after
    return peak


def plateau_fraction(evaluations: Sequence[DecidingValue], warmup: int, settings: ScheduleSettings) -> float:
    """The share of the peak that is left after ``evaluations``: torch's ``ReduceLROnPlateau``, relative threshold.

    Evaluations before the end of the warm-up are no bad ones, but an improvement is one over them too. Under a later
    criterion the best so far and the bad ones in a row start anew: its measure has another scale.
    """
    fraction, bad = 1.0, 0
    best = math.nan
    in_hand: Criterion | None = None
    for step, value, criterion in evaluations:
        higher_is_better = criterion.higher_is_better
        if criterion != in_hand:
            best, bad, in_hand = (-math.inf if higher_is_better else math.inf), 0, criterion
        margin = 1 + settings.threshold if higher_is_better else 1 - settings.threshold
        if (value > best * margin) if higher_is_better else (value < best * margin):
            best, bad = value, 0
        elif step >= warmup:
            bad += 1
        if bad > settings.patience:
            fraction = max(fraction * settings.factor, settings.minimum)
            bad = 0
    return fraction


def require_room_for_warmup(settings: ScheduleSettings, total_steps: int) -> None:
    """Raises ``UserError`` where the run ends before its warm-up does."""
    warmup = settings.steps_of_warmup(total_steps)
    if warmup and warmup >= total_steps:
        given = "warmup_steps is" if settings.warmup_ratio is None else f"warmup_ratio {settings.warmup_ratio} makes it"
        raise UserError(
            f"training.schedule.{given} {warmup}, but the run has only {total_steps} steps, so"
            " it would end before the learning rate reaches its peak. Lower it, or train longer (epochs, max_steps)."
        )


def require_evaluations(settings: ScheduleSettings, *, evaluated: bool) -> None:
    """Raises ``UserError`` where the rate goes by evaluations and the run makes none."""
    if settings.kind == "plateau" and not evaluated:
        raise UserError(
            "training.schedule.kind 'plateau' goes by evaluations, and the run has none: set validation too."
        )
