"""The share of its GPUs' peak that a step uses (MFU)."""

import torch
from torch import nn

from retrieval.encoders.structure import linear_parameters, outermost_transformers
from trainers.engine import collectives
from trainers.engine.settings import TrainingSettings
from trainers.estimate.machines import GPUS, known_gpu


def flops_per_token(module: nn.Module) -> float:
    """6 for each trained weight of the blocks' linear layers (forward, what is below it, itself), 4 for a frozen one.

    Of several transformers the mean. Attention, heads, padding and what is computed again don't count.
    """
    transformers = outermost_transformers(module)
    weights = [weight for each in transformers for weight in linear_parameters(each) if weight.ndim > 1]
    return sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights) / max(1, len(transformers))


def seconds_at_peak(module: nn.Module, settings: TrainingSettings) -> float | None:
    """Seconds of a token's arithmetic at the peak of all ranks' GPUs, in the run's precision.

    The GPUs are taken to be like this one. None if it is unknown, as on CPUs.
    """
    device = next(module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if (known := known_gpu(name)) is None:
        return None
    _, bfloat16, float32, _ = GPUS[known]
    tera = bfloat16 if settings.bf16 else bfloat16 / 2 if settings.tf32 else 0
    return flops_per_token(module) / ((tera or float32) * 1e12 * collectives.world_size())
