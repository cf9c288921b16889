"""Optimizers over the parameters that require gradients."""

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError


class OptimizerSettings(Settings):
    """The optimizer, its peak learning rate and the limit on the gradient.

    ``weight_decay`` is decoupled for adamw and radam and an L2 penalty for adam; biases and the weights of
    normalisation layers are exempt. ``max_grad_norm``: the global norm that gradients are scaled down to,
    None for no limit.
    """

    kind: Literal["adamw", "adam", "radam"] = "adamw"
    learning_rate: float = Field(default=2e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)


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
    exempt = _exempt_from_decay(module)
    named = trainable_parameters(module)
    groups = [
        {
            "params": [p for name, p in named.items() if name not in exempt],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for name, p in named.items() if name in exempt], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, betas, epsilon = settings.learning_rate, settings.betas, settings.epsilon
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon)
    if settings.kind == "adam":
        return torch.optim.Adam(groups, lr=rate, betas=betas, eps=epsilon)
    return torch.optim.RAdam(groups, lr=rate, betas=betas, eps=epsilon, decoupled_weight_decay=True)


def _exempt_from_decay(module: nn.Module) -> set[str]:
    exempt = set()
    for owner_name, owner in module.named_modules():
        is_norm = "norm" in type(owner).__name__.lower()
        for name, _ in owner.named_parameters(recurse=False):
            if is_norm or name == "bias" or name.endswith("_bias"):
                exempt.add(f"{owner_name}.{name}" if owner_name else name)
    return exempt
