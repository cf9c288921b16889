"""Whether a device has the precision of a run."""

import socket

import torch

from raytriever.retrieval.encoders.specification import has_bfloat16
from raytriever.retrieval.errors import UserError
from raytriever.trainers.settings import TrainingSettings


def require_precision(training: TrainingSettings, device: torch.device) -> list[str]:
    """Lines of warning where ``device`` computes in the run's precision slowly. A worker calls it before it trains.

    ``training.bf16`` is resolved: the driver chose it for all workers, whose processors it may not have seen. Raises
    ``UserError`` where it is on and the GPU has no bfloat16 instructions, so that it would emulate them.
    """
    if training.bf16 is not True or device.type not in ("cuda", "cpu") or has_bfloat16(gpu=device.type == "cuda"):
        return []
    host = socket.gethostname()
    if device.type == "cuda":
        raise UserError(
            f"training.bf16 is on (by 'auto' where a GPU is asked for), but the {torch.cuda.get_device_name(device)} of"
            f" {host} has no bfloat16 instructions and would emulate them. Set training.bf16 to false, or train on GPUs"
            " that have them (compute capability 8.0 or higher: A100, L4, H100 and the like)."
        )
    return [
        f"  Warning: training.bf16 is on, but the CPU of {host} has no bfloat16 instructions and emulates them, which"
        " is slower than float32. Set training.bf16 to false."
    ]
