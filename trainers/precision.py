"""The precision of losses and similarities, whatever their inputs come in."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, in float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
