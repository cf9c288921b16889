"""The pretend device does what a GPU does: it refuses tensors of the host, draws by itself, and is waited for."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.pretend_device import DEVICE, DeviceMistake, counted_waits


@pytest.mark.parametrize("mistake", [
    lambda x: x + torch.ones(4),
    lambda x: torch.cat([x, torch.ones(3, 4)]),
    lambda x: nn.Linear(4, 2)(x),
    lambda x: nn.functional.cross_entropy(x, torch.arange(3)),
    lambda x: torch.ones(2, 3) @ x,
    lambda x: x.add_(torch.ones(3, 4)),
    lambda x: torch.zeros(3, 4).add_(x),
])  # fmt: skip
def test_host_and_device_do_not_meet(mistake):
    with pytest.raises(DeviceMistake, match=r"on pretend:0 is given a tensor on the host: torch\."):
        mistake(torch.ones(3, 4, device=DEVICE))


def test_an_array_is_made_on_the_host():
    with pytest.raises(TypeError, match="copy it to the host first"):
        torch.ones(3, device=DEVICE).numpy()


WAITING = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool(x.isfinite().all()),
    "a place": lambda x: x[x.argmax() // 4],
    "a list": lambda x: x.tolist(),
    "a download": lambda x: x.cpu(),
    "places": lambda x: (x > 1).nonzero(),
    "distinct ones": lambda x: x.unique(),
    "a mask": lambda x: x[x > 1],
    "a tensor of a list": lambda x: x.new_tensor([1.0, 2.0]),
    "one on the device": lambda x: torch.tensor([1, 2], device=x.device),
    "a list of indices": lambda x: x[[0, 2]],
    "pageable memory": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "a blocking copy": lambda x: torch.ones(4).pin_memory().to(x.device),
    "one number set": lambda x: x.__setitem__((0, 1), 2.0),
    "one number set in places": lambda x: x.__setitem__(torch.arange(2, device=x.device), 2.0),
    "repetitions": lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=x.device), dim=0),
}


@pytest.mark.parametrize("case", WAITING)
def test_the_host_waits(case):
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    with counted_waits() as waits:
        WAITING[case](x)
    assert waits.total() == 1
    assert next(iter(waits)).startswith("tests/pretend/device.py:")


RUNNING_AHEAD = {
    "pinned memory": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "arithmetic": lambda x: (x @ x.T).softmax(dim=-1).masked_fill(torch.eye(3, dtype=torch.bool, device=x.device), 0.0),
    "indices": lambda x: x[torch.arange(2, device=x.device)],
    "numbers set": lambda x: x.__setitem__(0, 2.0),
    "a mask set": lambda x: x.__setitem__(x > 1, 0.0),
    "a tensor set in places": lambda x: x.index_put_((torch.arange(2, device=x.device),), x.new_ones(())),
    "one tensor set": lambda x: x.__setitem__((0, 1), x[1, 1]),
    "numbers of each row": lambda x: x.sum(dim=1).clamp(min=0.0) / 3,
    "counted repetitions": lambda x: torch.repeat_interleave(
        x, torch.ones(3, dtype=torch.int64, device=x.device), dim=0, output_size=3
    ),
}


@pytest.mark.parametrize("case", RUNNING_AHEAD)
def test_the_host_runs_ahead(case):
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    with counted_waits() as waits:
        RUNNING_AHEAD[case](x)
    assert not waits


def test_it_draws_from_a_generator_of_its_own():
    torch.manual_seed(1)
    drawn = torch.rand(3, device=DEVICE).inner
    torch.manual_seed(1)
    host = torch.rand(5)
    assert torch.equal(torch.rand(3, device=DEVICE).inner, drawn)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(5), host)


def test_a_checkpoint_repeats_dropout():
    torch.manual_seed(0)
    weights = torch.randn(8, 8, device=DEVICE, requires_grad=True)

    def loss(x):
        return nn.functional.dropout(x @ weights, 0.5).square().sum()

    gradients = []
    for cached in (False, True):
        torch.manual_seed(2)
        x = torch.ones(4, 8, device=DEVICE)
        (checkpoint(loss, x, use_reentrant=False) if cached else loss(x)).backward()
        gradients.append(weights.grad.inner.clone())
        weights.grad = None
    assert torch.equal(*gradients)


def test_autocast_casts_as_on_a_gpu():
    x, layer = torch.ones(3, 4, device=DEVICE), nn.Linear(4, 4).to(DEVICE)
    with torch.autocast("pretend", torch.bfloat16):
        multiplied = layer(x)
        assert multiplied.dtype == (x @ x.T).dtype == torch.bfloat16
        assert multiplied.softmax(dim=-1).dtype == nn.functional.layer_norm(multiplied, (4,)).dtype == torch.float32
        with torch.autocast("pretend", enabled=False):
            assert (x @ x.T).dtype == torch.float32
    multiplied.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
