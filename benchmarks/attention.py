"""Attention's kernels on a CPU: by precision, direction, length and padding, and by how the C library allocates.

    python -m benchmarks.attention
    python -m benchmarks.attention --heads 12 --width 64 --tokens 2048

One layer's attention over ``--tokens`` tokens in all: PyTorch's flash kernel, which it takes by itself; its formula
(``MATH``), which computes bfloat16 in float32; the same in bfloat16, which ``retrieval.encoders.attention`` chooses
where it is faster; and eager attention as transformers has it. Milliseconds that the process computes on one thread,
which other programs disturb less than the clock on the wall; kernels take turns; medians. Everything is measured in
three processes: with the C library as it is, as workers set it (``KEEPS_MEMORY``), and that with a single arena.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrieval.encoders.attention import KEEPS_MEMORY, in_bfloat16

LENGTHS = (32, 64, 128, 256, 512, 1024)
ALLOCATORS: dict[str, dict[str, str]] = {
    "as it is": {},
    "as workers set it": KEEPS_MEMORY,
    "with one arena": KEEPS_MEMORY | {"MALLOC_ARENA_MAX": "1"},
}
Attention = Callable[..., Tensor]


def main() -> None:
    """Prints a table for each way to allocate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process alone, as it was started")
    arguments = parser.parse_args()
    if not arguments.here:
        for name, variables in (("as it is", {}), ("as workers set it", KEEPS_MEMORY)):
            print(f"the C library {name}", flush=True)
            started = {**os.environ, **variables}
            subprocess.run(
                [sys.executable, "-m", "benchmarks.attention", *sys.argv[1:], "--here"], env=started, check=True
            )
        return
    torch.set_num_threads(arguments.threads)
    print(f"{'':37}{''.join(f'{name:>10}' for name in KERNELS)}")
    for dtype in (torch.bfloat16, torch.float32):
        for trains in (False, True):
            for length in LENGTHS:
                for padded in (False, True):
                    measure(dtype, length, arguments, trains=trains, padded=padded)


def measure(dtype: torch.dtype, length: int, arguments: argparse.Namespace, *, trains: bool, padded: bool) -> None:
    """Prints one row."""
    texts = max(1, arguments.tokens // length)
    shape = (texts, length, arguments.heads, arguments.width)
    heads = [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_(trains) for _ in range(3)]
    lengths = torch.linspace(length // 2, length, texts)[:, None]
    mask = (torch.arange(length) < lengths)[:, None, None] if padded else None
    taken: dict[str, list[float]] = {name: [] for name in KERNELS}
    for _ in range(arguments.rounds):
        for name, attend in KERNELS.items():
            started = time.process_time()
            with torch.set_grad_enabled(trains):
                attended = attend(*heads, attn_mask=mask)
                if trains:
                    torch.autograd.backward(attended, attended.detach())
            taken[name].append(time.process_time() - started)
            for each in heads:
                each.grad = None
    counted = "".join(f"{1000 * median(seconds[2:]):10.2f}" for seconds in taken.values())
    direction = "training" if trains else "embedding"
    print(f"{str(dtype)[6:]:9} {direction:10}{length:6} {'padded' if padded else 'full':9}{counted}", flush=True)


@contextmanager
def by(backend: SDPBackend, *, in_bf16: bool = False) -> Iterator[None]:
    """PyTorch's kernel ``backend``."""
    with sdpa_kernel(backend), in_bfloat16(allowed=in_bf16):
        yield


def eager(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """As transformers writes it out."""
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores + torch.where(attn_mask, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


KERNELS: dict[str, Attention] = {
    "flash": by(SDPBackend.FLASH_ATTENTION)(functional.scaled_dot_product_attention),
    "math": by(SDPBackend.MATH)(functional.scaled_dot_product_attention),
    "products": by(SDPBackend.MATH, in_bf16=True)(functional.scaled_dot_product_attention),
    "eager": eager,
}


if __name__ == "__main__":
    main()
