"""Where a worker computes, checked before it loads anything."""

import socket

import torch

from raytriever.retrieval.encoders.specification import Dtype, require_dtype
from raytriever.retrieval.errors import UserError


def worker_device(gpus_per_worker: float, dtype: Dtype) -> torch.device:
    """This worker's GPU where it has one, else its CPU.

    Raises ``UserError`` where torch finds no GPU, or where the processor lacks ``dtype``, which the driver chose.
    """
    host, gpu = socket.gethostname(), gpus_per_worker > 0
    if gpu and not torch.cuda.is_available():
        raise UserError(
            f"gpus_per_worker is {gpus_per_worker}, but torch finds no GPU on {host}. Install a torch built for CUDA"
            " there, or set resources.gpus_per_worker to 0."
        )
    require_dtype(dtype, host, gpu=gpu)
    return torch.device("cuda" if gpu else "cpu")
