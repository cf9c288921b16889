"""How fast some steps went and how much memory they took: the second block below the ledger, and the log's."""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Throughput:
    """What some steps measured: rates over all ranks, and the memory of this process and its device at most, in bytes.

    ``device_bytes`` is None where there is no CUDA device; ``waiting_share`` of the time went into waiting for data.
    """

    steps: int
    examples_per_second: float
    tokens_per_second: float
    waiting_share: float
    process_bytes: int
    device_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the log."""
        return asdict(self)


def measure_throughput(points: Sequence[Mapping[str, Any]], device: torch.device) -> Throughput:
    """Of the points of a curve (one a step, at least one). The first is left out of rates: it warms up."""
    timed = points[1:] or points
    seconds = max(sum(point["seconds"] for point in timed), 1e-9)
    return Throughput(
        steps=len(timed),
        examples_per_second=sum(point["examples"] for point in timed) / seconds,
        tokens_per_second=sum(point.get("tokens", 0) for point in timed) / seconds,
        waiting_share=sum(point["waiting_seconds"] for point in timed) / seconds,
        process_bytes=peak_process_bytes(),
        device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def measured_lines(measured: Throughput) -> list[str]:
    """For the terminal, below the ledger."""
    memory = f"{measured.process_bytes / 2**30:.2f} GiB of memory"
    if measured.device_bytes is not None:
        memory += f", {measured.device_bytes / 2**30:.2f} GiB on the GPU"
    tokens = f"{measured.tokens_per_second:,.0f} tokens/s, " if measured.tokens_per_second else ""
    return [
        f"measured over {measured.steps:,} {'step' if measured.steps == 1 else 'steps'}:",
        f"  speed   {measured.examples_per_second:,.1f} examples/s, {tokens}waiting {measured.waiting_share:.1%}",
        f"  memory  at most {memory} (first rank)",
    ]


def peak_process_bytes() -> int:
    """The most memory that this process ever held in RAM."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
