"""GPUs by name, and nodes of them: what they hold, compute and send."""

from dataclasses import dataclass, replace

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean

GPUS = {
    "h100": (79.1, 989, 67, 450),
    "h200": (139.8, 989, 67, 450),
    "b200": (178.4, 2250, 75, 900),
    "a100": (79.1, 312, 19.5, 300),
    "a100-40gb": (39.4, 312, 19.5, 300),
    "l40s": (44.4, 362, 91, 32),
    "l4": (22.0, 121, 30, 32),
    "a10g": (22.0, 70, 31, 32),
    "rtx4090": (23.5, 165, 82, 32),
    "v100": (31.7, 0, 15.7, 150),
    "t4": (14.6, 0, 8.1, 16),
}
"""By their makers' sheets: GiB; dense TFLOP/s in bfloat16, 0 for none, and float32; GB/s to the next of a node."""

_CORES, _OF_NODE = 12, 8  # of a GPU; GPUs
_RESERVE, _GAPS = 1.0, 1.1  # GiB of CUDA and NCCL; what the allocator holds over what is asked of it


@dataclass(frozen=True)
class Machines:
    """Nodes, and what each has; all assumptions. Bytes and operations are those of a second."""

    nodes: int = 1
    cores: int = 96
    gpus: int = 8
    peak: float = 312e12  # of a GPU
    share: float = 0.4  # of the peak
    node_bandwidth: float = 2e9  # between a node and the store
    store_bandwidth: float = 20e9  # of the store, for all nodes together
    network: float = 50e9  # of a node, to the others

    @property
    def operations(self) -> float:
        """Of a GPU."""
        return self.peak * self.share


@dataclass(frozen=True)
class Gpu:
    """One of ``count`` equal GPUs. ``gib``: memory; ``peak``, ``single``: TFLOP/s in bfloat16, 0 for none, and float32;
    ``link``: GB/s to the next one."""

    name: str
    count: int
    gib: float
    peak: float
    single: float
    link: float

    def needs(self, peak: float) -> float:
        """GiB that a run takes which holds so many bytes of tensors at most."""
        return peak / 2**30 * _GAPS + _RESERVE

    def machines(self) -> Machines:
        """Nodes of up to eight, with twelve cores for each."""
        gpus, peak = min(self.count, _OF_NODE), (self.peak or self.single) * 1e12
        return replace(Machines(), nodes=-(-self.count // _OF_NODE), cores=_CORES * gpus, gpus=gpus, peak=peak)


def known_gpu(device: str) -> str | None:
    """Which of ``GPUS`` a device is by the name that CUDA gives it; None for another one."""
    words = set(device.lower().replace("rtx ", "rtx").replace("-", " ").split())
    fitting = [name for name in GPUS if words.issuperset(name.split("-"))]
    return max(fitting, key=len, default=None)  # A100-40GB is an A100, too


def find_gpu(name: str, count: int) -> Gpu:
    """Raises ``UserError`` for an unknown one."""
    if name not in GPUS:
        raise UserError(
            f"--gpu {name}: no such GPU is known.{did_you_mean(name, list(GPUS))} Known: {', '.join(GPUS)}."
        )
    return Gpu(name, count, *GPUS[name])
