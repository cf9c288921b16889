"""In which precision a run computes."""

import torch
from torch import nn

from retrieval.encoders.structure import linear_parameters, outermost_transformers


def round_frozen(module: nn.Module) -> None:
    """Keeps the frozen weights of linear layers in bfloat16, in place: as autocast reads them, bit for bit.

    Of weights without a gradient autocast would make, and keep for the backward pass, a copy in each forward pass.
    """
    for transformer in outermost_transformers(module):
        for parameter in linear_parameters(transformer):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


def restore_frozen(module: nn.Module, exact: nn.Module) -> None:
    """Puts what ``round_frozen`` rounded in ``module`` back in float32, from the same module as it was loaded.

    Where the weights in ``exact`` are: on the CPU, say, for what no GPU has room for.
    """
    weights = dict(exact.named_parameters())
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = weights[name].data
