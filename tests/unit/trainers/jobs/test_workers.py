"""How many CPUs a training worker gets where nothing is set."""

import pytest

from raytriever.trainers.jobs.workers import even_share


@pytest.mark.parametrize(
    ("cpus_of_nodes", "workers", "share"),
    [
        ([2], 1, 2),
        ([2], 2, 1),
        ([8], 3, 2),
        ([1, 1], 1, 1),  # a worker doesn't span nodes
        ([0, 96, 96], 1, 96),
        ([0, 96, 96], 4, 48),
        ([16, 4], 3, 5),
        ([2, 2], 8, 1),  # more than fit at a time
        ([0], 1, 1),  # nodes come when they are asked for
        ([], 2, 1),
    ],
)
def test_each_worker_has_an_even_share_of_one_node(cpus_of_nodes: list[int], workers: int, share: int) -> None:
    assert even_share(cpus_of_nodes, workers) == share
