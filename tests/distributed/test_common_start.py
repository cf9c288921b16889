"""Ranks whose weights start apart train as if all had the first one's."""

import numpy as np
import torch

from tests.distributed.processes import run_in_processes
from tests.unit.trainers.tiny import TinyBatches, tiny_objective, tiny_settings, weights_of
from trainers.engine.loop import train


def run_from_apart(rank: int) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    objective = tiny_objective()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.1 * rank)
    train(objective, TinyBatches(), tiny_settings())
    return weights_of(objective)


def test_ranks_that_start_apart_end_as_the_first_alone() -> None:
    one, other = run_in_processes(run_from_apart, 2)
    (alone,) = run_in_processes(run_from_apart, 1)
    for name, expected in alone.items():
        np.testing.assert_array_equal(one[name], other[name])
        np.testing.assert_allclose(one[name], expected, atol=2e-6)
