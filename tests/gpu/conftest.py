"""The devices that these tests run on: the CPU everywhere, which proves their code, and CUDA where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.devices import CUDA


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Every test here computes in one thread."""


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes."""
    return torch.device(request.param)


@pytest.fixture
def one_rank(device: torch.device, tmp_path: Path) -> Iterator[torch.device]:
    """The device, in a process group of one rank: NCCL on a GPU, gloo on the CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()
