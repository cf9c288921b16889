"""What GPUs hold, compute and send, by their makers' sheets: for utilisation in training, and for estimates."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """``gib``: of memory; ``bfloat16`` (0: it has none; TensorFloat-32 has half) and ``float32``: TFLOP/s, dense;
    ``link``: GB/s to the next GPU of its node, one way."""

    gib: float
    bfloat16: float
    float32: float
    link: float


GPUS = {
    "b200": Gpu(178.4, 2250, 75, 900),
    "h200": Gpu(139.8, 989, 67, 450),
    "h100": Gpu(79.1, 989, 67, 450),
    "a100": Gpu(79.1, 312, 19.5, 300),
    "a100-40gb": Gpu(39.4, 312, 19.5, 300),
    "l40s": Gpu(44.4, 362, 91, 32),
    "l4": Gpu(22.0, 121, 30, 32),
    "a10g": Gpu(22.0, 70, 31, 32),
    "rtx4090": Gpu(23.5, 165, 82, 32),
    "v100": Gpu(31.7, 0, 15.7, 150),
    "t4": Gpu(14.6, 0, 8.1, 16),
}


def known_gpu(device_name: str) -> Gpu | None:
    """The one that torch calls so ('NVIDIA H100 80GB HBM3'); None for one that isn't listed."""
    words = device_name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)
