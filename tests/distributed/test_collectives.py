"""Rows, sums, gradients and weights over two and three ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.processes import run_in_processes
from trainers.engine import collectives

ROWS = [3, 0, 2]  # of each rank


def everything() -> torch.Tensor:
    return torch.randn(sum(ROWS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def coupled_loss(mine: torch.Tensor, all_rows: torch.Tensor) -> torch.Tensor:
    """Own rows against all rows, so that every rank's loss depends on every rank's rows."""
    return torch.logsumexp(mine @ all_rows.T, dim=1).sum() + (all_rows.T**3).sum() * (1 + len(mine))


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
    loss = (module.a.sum() + 2 * module.b.sum()) * (rank + 1) / 10 + module.c.sum()
    if rank == 0:
        loss = loss + module.only_first.sum()
    with collectives.GradientSum(module.parameters()) as total:
        total.start()
        loss.backward()
    sums = {name: None if p.grad is None else p.grad.numpy() for name, p in module.named_parameters()}
    collectives.broadcast_weights(module)
    total = collectives.sum_across_ranks(torch.tensor([rank, 10.0]))
    found = gathered.detach().numpy(), mine.grad.numpy(), even.flatten().tolist()
    return *found, sums, module.c.tolist(), total.tolist()


def overlapping(rank: int):
    """Gradients that are complete in another order on each rank, one of them never on one, in buckets of one each."""
    collectives._BUCKET_BYTES = 8
    parameters = [nn.Parameter(torch.full((3,), float(number))) for number in range(1, 5)]
    in_order = parameters[::-1] if rank else parameters[1:]
    found = []
    for dtype in (None, torch.bfloat16):
        torch.stack(in_order).sum().backward()  # an earlier piece
        with collectives.GradientSum(parameters, dtype) as gradients:
            gradients.start()
            (2 * torch.stack([parameter**2 for parameter in in_order]).sum()).backward()
            sent = len(gradients._under_way)
        found.append([parameter.grad.tolist() for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    return found, sent


def test_gradients_are_sent_while_a_backward_pass_goes_on_in_one_order():
    (first, sent_by_first), (second, sent_by_second) = run_in_processes(overlapping, 2)
    assert first == second
    exact, rounded = first
    assert exact == rounded == [[5.0] * 3, [18.0] * 3, [26.0] * 3, [34.0] * 3]
    assert (sent_by_first, sent_by_second) == (3, 4)  # the first parameter, last in order, has no gradient on one


def test_a_gradient_that_is_complete_twice_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "_group_of_gradients", lambda _: None)
    parameter = nn.Parameter(torch.zeros(2))
    other = nn.Parameter(torch.zeros(2))
    gradients = collectives.GradientSum([parameter, other])
    gradients.start()
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="twice"):
        parameter.sum().backward()
    gradients.__exit__(RuntimeError, None, None)
    parameter.sum().backward()  # it is watched no longer


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
        first = {name: float(array.flat[0]) for name, array in sums.items() if name != "unused"}
        assert first == pytest.approx({"a": 0.6, "b": 1.2, "only_first": 1.0, "c": 3.0}, rel=1e-12)
        assert broadcast == [0.0, 0.0]
        assert total == [3.0, 30.0]
