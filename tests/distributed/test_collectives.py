import numpy as np
import torch
from torch import nn

from tests.distributed.processes import run_in_processes
from trainers.engine import collectives

ROWS = [3, 0, 2]  # of each rank


def everything() -> torch.Tensor:
    return torch.randn(sum(ROWS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def coupled_loss(mine: torch.Tensor, all_rows: torch.Tensor) -> torch.Tensor:
    """Own rows against all rows, so that every rank's loss depends on every rank's rows."""
    return torch.logsumexp(mine @ all_rows.T, dim=1).sum() + (all_rows**3).sum() * (1 + len(mine))


def gather_and_sum(rank: int):
    start = sum(ROWS[:rank])
    mine = everything()[start : start + ROWS[rank]].requires_grad_()
    gathered = collectives.gather(mine)
    coupled_loss(mine, gathered).backward()
    even = collectives.gather(torch.full((2, 1), float(rank)))

    module = nn.Module()
    for name, shape in (("a", (3, 2)), ("b", (5,)), ("only_first", (2,)), ("unused", (2,))):
        module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
    module.c = nn.Parameter(torch.full((2,), float(rank)))
    loss = (module.a.sum() + 2 * module.b.sum()) * (rank + 1) + module.c.sum()
    if rank == 0:
        loss = loss + module.only_first.sum()
    loss.backward()
    collectives.sum_gradients(module.parameters())
    sums = {name: None if p.grad is None else p.grad.numpy() for name, p in module.named_parameters()}
    collectives.broadcast_weights(module)
    total = collectives.sum_across_ranks(torch.tensor([rank, 10.0]))
    return (
        gathered.detach().numpy(),
        mine.grad.numpy(),
        even.flatten().tolist(),
        sums,
        module.c.tolist(),
        total.tolist(),
    )


def test_three_ranks_with_unequal_rows_equal_one_process():
    rows = everything().requires_grad_()
    blocks = rows.split(ROWS)
    sum(coupled_loss(block, rows) for block in blocks).backward()
    answers = run_in_processes(gather_and_sum, 3)
    for rank, (gathered, gradient, even, sums, broadcast, total) in enumerate(answers):
        np.testing.assert_array_equal(gathered, everything().numpy())
        np.testing.assert_allclose(gradient, rows.grad.split(ROWS)[rank].numpy(), rtol=1e-12, atol=1e-12)
        assert even == [0, 0, 1, 1, 2, 2]
        assert sums["unused"] is None
        assert {name: float(sums[name].flat[0]) for name in ("a", "b", "only_first", "c")} == {
            "a": 6.0,
            "b": 12.0,
            "only_first": 1.0,
            "c": 3.0,
        }
        assert broadcast == [0.0, 0.0]
        assert total == [3.0, 30.0]


def test_without_a_process_group_nothing_changes():
    rows = torch.ones(2, 3, requires_grad=True)
    assert collectives.gather(rows) is rows
    parameter = nn.Parameter(torch.zeros(1))
    collectives.sum_gradients([parameter])
    assert parameter.grad is None
    assert collectives.sum_across_ranks(rows).tolist() == rows.tolist()
    assert (collectives.world_size(), collectives.rank(), collectives.neighbours(1)) == (1, 0, None)
    collectives.barrier()
