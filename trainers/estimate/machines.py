"""GPUs by name, and nodes of them: what they hold, compute and send; how much of that a step uses (MFU)."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from raytriever.stages.cost import Cost
from retrieval.encoders.structure import linear_parameters, outermost_transformers
from trainers.engine import collectives
from trainers.engine.settings import TrainingSettings

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

_CORES = 12  # of a GPU
_RESERVE, _GAPS = 1.0, 1.1  # GiB of CUDA and NCCL; what the allocator holds over what is asked of it
_TASK = 5e-3  # seconds of the driver for a task: 9.9 s for 2,000 that do nothing


@dataclass(frozen=True)
class Machines:
    """``count`` GPUs in nodes of up to eight, with twelve cores for each; what a second gives is assumed.

    ``gib``: a GPU's memory. ``peak``, ``single``: its TFLOP/s in bfloat16 (0 for none) and in float32. It reaches
    ``share`` of them. ``link``: GB/s to the next GPU of its node. ``network``: GB/s from a node to the others. The
    bandwidths: GB/s between a node and the store, and of the store for all nodes together.
    """

    name: str
    count: int
    gib: float
    peak: float
    single: float
    link: float
    per_node: int = 8
    cores: int = 0  # of a node
    share: float = 0.4
    network: float = 50
    node_bandwidth: float = 2
    store_bandwidth: float = 20

    @property
    def nodes(self) -> int:
        """How many."""
        return ceil(self.count / self.per_node)

    @property
    def slots(self) -> int:
        """Cores of all nodes."""
        return self.nodes * (self.cores or _CORES * min(self.count, self.per_node))

    def needs(self, peak: float) -> float:
        """GiB that a run takes which holds so many bytes of tensors at most."""
        return peak / 2**30 * _GAPS + _RESERVE

    def operations(self, *, bf16: bool = True) -> float:
        """Of a GPU, a second."""
        return (self.peak if bf16 and self.peak else self.single) * 1e12 * self.share

    def exchange(self, sent: float) -> float:
        """Seconds in which each GPU sends so many bytes to others."""
        return sent / 1e9 / (self.link if self.nodes == 1 else self.network / self.per_node)


def known_gpu(device: str) -> str | None:
    """Which of ``GPUS`` a device is by the name that CUDA gives it; None for another one."""
    words = set(device.lower().replace("rtx ", "rtx").replace("-", " ").split())
    fitting = [name for name in GPUS if words.issuperset(name.split("-"))]
    return max(fitting, key=len, default=None)  # A100-40GB is an A100, too


def find_gpus(name: str, count: int) -> Machines:
    """Raises ``UserError`` for an unknown one."""
    if name not in GPUS:
        raise UserError(f"--gpu {name}: no such GPU is known.{did_you_mean(name, list(GPUS))}")
    return Machines(name, count, *GPUS[name])


def seconds_by_cause(
    cost: Cost, read: float, machines: Machines, slots: int = 0, busy: str = "cores"
) -> dict[str, float]:
    """Seconds of a stage by their cause; none where the inputs' size is unknown.

    Each node copies the ``read`` bytes of the inputs. Then its tasks run on ``slots``, by default on all cores.
    ``busy`` names the cause where all slots work.
    """
    if not cost.tasks:
        return {}
    slots, nodes = slots or machines.slots, min(machines.nodes, cost.tasks)
    working, handing_out = ceil(cost.tasks / slots) * cost.work / cost.tasks, _TASK * cost.tasks
    found = {"one task": cost.alone, busy if cost.tasks >= slots else "the longest task": working}
    if handing_out > working:
        found = {"one task": cost.alone, "the driver": handing_out}
    of_node = (read + cost.made.disk / nodes) / machines.node_bandwidth / 1e9
    of_store = (read * nodes + cost.made.disk) / machines.store_bandwidth / 1e9
    found["the store" if of_store > of_node else "a node's reading"] = max(of_node, of_store)
    return found


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
