"""Ranks whose weights start apart train as if all had the first one's."""

import numpy as np
import pytest
import torch

from tests.distributed.processes import assert_close, run_in_processes
from tests.unit.trainers.tiny import TinyBatches, tiny_objective, tiny_settings, weights_of
from trainers.engine.loop import train


def run_from_apart(rank: int) -> dict[str, np.ndarray]:
    objective = tiny_objective()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.1 * rank)
    train(objective, TinyBatches(), tiny_settings())
    return weights_of(objective)


@pytest.mark.usefixtures("one_thread")
def test_ranks_that_start_apart_end_as_the_first_alone() -> None:
    one, other = run_in_processes(run_from_apart, 2)
    assert_close(other, one, rtol=0)
    assert_close(one, run_from_apart(0), rtol=1e-7, atol=2e-6)
