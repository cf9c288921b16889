"""GPUs by name: what they hold, compute and send."""

from dataclasses import dataclass, replace

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from trainers.estimate.costs import Machines
from trainers.estimate.gpus import GPUS

_CORES, _OF_NODE = 12, 8  # of a GPU; GPUs
_RESERVE, _GAPS = 1.0, 1.1  # GiB of CUDA and NCCL; what the allocator holds over what is asked of it


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


def find_gpu(name: str, count: int) -> Gpu:
    """Raises ``UserError`` for an unknown one."""
    if name not in GPUS:
        raise UserError(
            f"--gpu {name}: no such GPU is known.{did_you_mean(name, list(GPUS))} Known: {', '.join(GPUS)}."
        )
    return Gpu(name, count, *GPUS[name])
