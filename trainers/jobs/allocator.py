"""How the C library of a training worker handles memory, where tensors are on the CPU.

A step's activations and gradients are freed at its end, and glibc gives blocks so large back to the system: the next
step has every page mapped and zeroed anew, a seventh of its time in small runs. In the thread in which Ray Train
runs, which has a heap of its own of at most 64 MiB, it is a fifth. `benchmarks/ray_train_share` measures it.
"""

import platform

_KEEP = 1 << 32  # bytes; blocks up to this come from the heap, and the heap keeps as much
_ACCEPTED_SINCE = (2, 35)  # earlier releases refuse such a threshold and take the other: then all blocks are mapped


def worker_environment(libc: tuple[str, str] | None = None) -> dict[str, str]:
    """Variables that must be set before the worker starts, so that its heap is one and is kept from step to step.

    ``libc``: name and version of the C library (None: this process's). Empty where that isn't glibc from 2.35 on.
    """
    name, version = libc or platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < _ACCEPTED_SINCE:
        return {}
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(_KEEP),
        "MALLOC_TRIM_THRESHOLD_": str(2 * _KEEP),
    }
