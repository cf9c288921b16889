"""Collectives and FSDP2 in a process group of one rank, and memory that runs out."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from raytriever.errors import UserError
from tests.gpu.devices import CUDA
from tests.gpu.objectives import make_objective
from tests.gpu.test_objectives import cosine, gradients_of, step
from trainers.engine import collectives
from trainers.engine.optimization import build_optimizer
from trainers.engine.settings import IN_TRAINING, OptimizerSettings, naming_full_memory
from trainers.engine.sharding import is_sharded, like, shard, whole, whole_weights

NAME = "contrastive, cached"


def test_collectives(one_rank: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 4, device=one_rank, requires_grad=True)
    gathered = collectives._Gather.apply(rows, [3], None)  # what more ranks would do
    assert torch.equal(gathered, rows)
    (gathered**2).sum().backward()
    torch.testing.assert_close(rows.grad, 2 * rows)
    assert collectives.gather(rows) is rows
    assert collectives.sum_across_ranks(torch.ones(2, device=one_rank)).tolist() == [1.0, 1.0]
    module = torch.nn.Linear(3, 2).to(one_rank)
    module(torch.ones(1, 3, device=one_rank)).sum().backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    monkeypatch.setattr(collectives, "world_size", lambda _=None: 2)  # so that gradients are sent, to itself
    with collectives.GradientSum(module.parameters()) as total:
        total.start()
        module(torch.ones(1, 3, device=one_rank)).sum().backward()
    collectives.broadcast_weights(module)
    collectives.barrier()
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_sharded_is_replicated(one_rank: torch.device, tiny_encoder: Path, bf16: bool, lora: bool) -> None:
    replicated = make_objective(NAME, tiny_encoder, lora).to(one_rank)
    sharded = make_objective(NAME, tiny_encoder, lora).to(one_rank)
    shard(sharded)
    assert is_sharded(sharded)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    optimizers = [build_optimizer(each, OptimizerSettings(learning_rate=1e-3)) for each in (replicated, sharded)]
    for _ in range(2):
        expected, found = step(replicated, NAME, bf16), step(sharded, NAME, bf16)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
        gradients = {name: whole(gradient) for name, gradient in gradients_of(sharded).items()}
        assert cosine(gradients, gradients_of(replicated)) > 0.99999
        for optimizer in optimizers:
            optimizer.step()
    encoder = sharded.encoder("query").eval()
    features = {name: tensor.to(one_rank) for name, tensor in encoder.tokenize(["w1 w2", "w3"], "query").items()}
    with whole_weights(sharded), torch.no_grad():
        vectors = encoder(features)
        torch.testing.assert_close(vectors, replicated.encoder("query").eval()(features), rtol=1e-3, atol=1e-4)
    for parameter in sharded.parameters():
        assert torch.equal(whole(like(parameter, whole(parameter.detach()).cpu())), whole(parameter.detach()))


@pytest.mark.parametrize("device", [CUDA])
def test_full_memory_names_the_knobs(device: str) -> None:
    message = r"The GPU's memory is full in training: Tried to allocate .*objective\.gradient_cache"
    with pytest.raises(UserError, match=message), naming_full_memory("training", IN_TRAINING):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_8_bits(device: str) -> None:
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    module = torch.nn.Linear(64, 128).to(device)
    optimizer = build_optimizer(module, OptimizerSettings(kind="adamw_8bit", learning_rate=0.01))
    before = module.weight.detach().clone()
    module(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close((module.weight - before).abs(), torch.full_like(before, 0.01), rtol=0.05, atol=0)
    assert optimizer.state[module.weight]["state1"].dtype == torch.uint8
