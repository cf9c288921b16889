"""Optimizers over the parameters that require gradients, and the learning rate as a pure function of position."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raytriever.errors import UserError
from retrieval.encoders.static import trains_table
from trainers.engine.early_stopping import DecidingValue
from trainers.engine.settings import OptimizerSettings, ScheduleSettings, require_package, require_sparse


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter, in the module's order, for all that require gradients.

    Raises ``UserError`` where none does.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not named:
        raise UserError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to train:"
            " everything is frozen. Unfreeze an encoder or give it LoRA adapters."
        )
    return named


def build_optimizer(module: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer over all parameters that require gradients; the caller sets each step's learning rate.

    Raises ``UserError`` for settings that don't work with a token table, because its gradient is sparse.
    """
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    if trains_table(module):
        return _lazy_adam(module, settings, options)
    groups = _groups(module, settings.weight_decay)
    in_8_bits = require_package(settings)
    if in_8_bits is not None:
        if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
            raise UserError(
                "An 8-bit optimizer can't update weights that are sharded over ranks, because its blocks of"
                " numbers would depend on the number of ranks. Sharding divides the optimizer's memory by the"
                " ranks anyway: set training.optimizer.kind to adamw, or train without sharding."
            )
        return cast(torch.optim.Optimizer, in_8_bits.AdamW8bit(groups, **options))
    if settings.kind != "radam":
        # in one kernel: faster than the default on a CPU, and without the copy of all weights it makes on CUDA
        return (torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam)(groups, **options, fused=True)
    return torch.optim.RAdam(groups, **options, decoupled_weight_decay=True)


def _lazy_adam(module: nn.Module, settings: OptimizerSettings, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Adam on the rows of a batch's tokens alone: other rows keep their vectors and moments."""
    require_sparse(settings)
    named = trainable_parameters(module)
    if len(named) > 1:
        raise UserError(
            "A static encoder trains only its table of token vectors, but there are other weights to train:"
            f" {', '.join(list(named)[:3])}. Choose an objective without weights of its own, such as contrastive,"
            " and an encoder without dense layers."
        )
    return torch.optim.SparseAdam(list(named.values()), **options)


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by weight decay. Sharded ones are apart, because one fused update can't mix them with others."""
    exempt = _exempt_from_decay(module)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable_parameters(module).items():
        groups.setdefault((name in exempt, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": groups[without_decay, shared_out], "weight_decay": 0.0 if without_decay else weight_decay}
        for without_decay, shared_out in sorted(groups)
    ]


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


def learning_rate(
    step: int, total_steps: int, peak: float, settings: ScheduleSettings, evaluations: Sequence[DecidingValue] = ()
) -> float:
    """The rate of ``step`` (0-based) in a run of ``total_steps``.

    Warm-up: peak (step + 1) / warm-up steps, so its last step is at the peak and none is wasted at zero. After it, let
    t = step - warm-up steps. constant is peak. linear is peak (1 - (1 - minimum) t / (total_steps - warm-up steps)).
    exponential is peak decay^t. plateau is peak times ``plateau_fraction`` of the ``evaluations`` before the step, in
    order of their steps.
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
    fraction = 1.0
    for criterion, decided in groupby(evaluations, key=lambda evaluation: evaluation.criterion):
        higher_is_better = criterion.higher_is_better
        best, bad = (-math.inf if higher_is_better else math.inf), 0
        margin = 1 + settings.threshold if higher_is_better else 1 - settings.threshold
        for step, value, _ in decided:
            if (value > best * margin) if higher_is_better else (value < best * margin):
                best, bad = value, 0
            elif step >= warmup:
                bad += 1
            if bad > settings.patience:
                fraction = max(fraction * settings.factor, settings.minimum)
                bad = 0
    return fraction
