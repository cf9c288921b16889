"""The devices that these tests run on: the CPU everywhere, which proves their code, and CUDA where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.devices import CUDA


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slowed down by more threads, tenfold where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
