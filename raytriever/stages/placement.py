"""How many workers the nodes of a cluster hold, and how many threads a worker has."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.reports.table import counted

_ROUNDING = 1e-6  # of a quotient: three workers of 1/3 of a GPU fit on one


class NodeRoom(NamedTuple):
    """The CPUs and GPUs of a node."""

    cpus: int
    gpus: float = 0

    def workers(self, cpus: float, gpus: float) -> int:
        """Number of workers with this many CPUs and GPUs that fit on it."""
        held = int(self.cpus / cpus)
        return min(held, int(self.gpus / gpus + _ROUNDING)) if gpus > 0 else held


def cpus_of_a_worker(workers: int, gpus_per_worker: float) -> int:
    """The even share. Logs a line if the nodes of the workers have not joined yet."""
    nodes = living_nodes()
    if not any(node.workers(1, gpus_per_worker) for node in nodes):
        kind = "GPUs" if gpus_per_worker > 0 else "CPUs"
        log.info(
            f"  no node has {kind} for a worker yet, so each worker requests 1 CPU; set resources.cpus_per_worker"
            " to request more"
        )
    return even_share(nodes, workers, gpus_per_worker)


def even_share(nodes: Sequence[NodeRoom], workers: int, gpus_per_worker: float = 0) -> int:
    """The most CPUs that each of ``workers`` can have at a time on a single node; at least 1.

    Nodes without room for a worker's GPUs hold none. If the GPUs are too few for all workers, the CPUs are divided
    among as many as have GPUs, because fewer CPUs would not make room for more.
    """
    workers = min(workers, sum(node.workers(1, gpus_per_worker) for node in nodes))
    share = max([1, *(node.cpus for node in nodes if node.workers(1, gpus_per_worker))])
    while share > 1 and sum(node.workers(share, gpus_per_worker) for node in nodes) < workers:
        share -= 1
    return share


def workers_that_fit(cpus: float, gpus: float) -> int:
    """Number of workers of this size that the cluster has room for, each on one node."""
    return sum(node.workers(cpus, gpus) for node in living_nodes())


def living_nodes() -> list[NodeRoom]:
    """Those of Ray that are not lost."""
    import ray

    return [
        NodeRoom(int(node["Resources"].get("CPU", 0)), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def require_room(cpus: float, gpus: float, workers: int = 1, *, is_alone: bool) -> None:
    """Raises ``UserError`` unless there is room for so many workers of this size, for which Ray would wait.

    On a cluster, which nodes may join (not ``is_alone``), the log says that it waits.
    """
    if (room := workers_that_fit(cpus, gpus)) >= workers:
        return
    lacking = f"room for {counted(room, 'worker')} of {cpus:g} CPUs and {gpus:g} GPUs, and the stage needs {workers}"
    settings = f"resources.{'workers, ' * (workers > 1)}cpus_per_worker or gpus_per_worker"
    if is_alone:
        raise UserError(f"This machine has {lacking}. Lower {settings}, or submit it to a cluster.")
    log.info(f"  the cluster has {lacking}: it waits for nodes. If none will come, stop it and lower {settings}.")


def tokenizing_threads(cpus: float) -> dict[str, str]:
    """Variables of a worker with a GPU: as many tokenizer threads as it has CPUs, so that the GPU doesn't wait."""
    return {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(max(1, int(cpus)))}


@contextmanager
def threads_of_a_worker(cpus: float) -> Iterator[None]:
    """Gives this process's libraries as many threads as those of a worker with ``cpus`` have: sums depend on it.

    A library that is loaded meanwhile reads the number from the environment.
    """
    from threadpoolctl import threadpool_limits

    threads, name = max(1, int(cpus)), "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = str(threads)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
