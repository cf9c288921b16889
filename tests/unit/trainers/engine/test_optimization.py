import math
import sys

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyEncoder
from trainers.engine.checkpoint import Checkpoints, State
from trainers.engine.optimization import build_optimizer, trainable_parameters
from trainers.engine.settings import OptimizerSettings


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_biases_and_norms_do_not_decay_and_frozen_weights_are_left_out():
    encoder = TinyEncoder()
    encoder.extra = RootMeanSquareNorm()
    encoder.log_temperature = nn.Parameter(torch.tensor(-3.0))
    encoder.embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(encoder, OptimizerSettings(weight_decay=0.1))
    names = {parameter: name for name, parameter in encoder.named_parameters()}
    found = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert found == {
        0.1: {"layers.0.weight", "layers.1.weight", "projection.weight"},
        0.0: {
            "layers.0.bias",
            "layers.1.bias",
            "projection.bias",
            "norm.weight",
            "norm.bias",
            "extra.weight",
            "log_temperature",
        },
    }


@pytest.mark.parametrize("kind", ["adamw", "adam", "radam"])
def test_a_learned_temperature_without_a_gradient_stays(kind):
    module = nn.Module()
    module.log_temperature, module.table = nn.Parameter(torch.tensor(-3.0)), nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(module, OptimizerSettings(kind=kind, learning_rate=0.1, weight_decay=0.5))
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert module.log_temperature.item() == -3.0
    assert (module.table < 1).all()


def test_nothing_to_train_is_refused():
    encoder = TinyEncoder().requires_grad_(False)
    with pytest.raises(UserError, match="everything is frozen"):
        trainable_parameters(encoder)


def steps_of(kind: str, gradients: np.ndarray) -> np.ndarray:
    settings = OptimizerSettings(kind=kind, learning_rate=0.1, weight_decay=0.01, betas=(0.8, 0.9), epsilon=1e-6)
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = build_optimizer(module, settings)
    for gradient in gradients:
        module.w.grad = torch.from_numpy(gradient)
        optimizer.step()
    return module.w.detach().numpy()


@pytest.mark.parametrize("kind", ["adamw", "adam", "radam"])
def test_updates_against_the_papers(kind):
    """Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019), RAdam (Liu et al. 2020) with decoupled decay."""
    gradients = np.random.default_rng(0).normal(size=(12, 3))
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    rate, decay, b1, b2, epsilon = 0.1, 0.01, 0.8, 0.9, 1e-6
    limit = 2 / (1 - b2) - 1
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + decay * w if kind == "adam" else gradient
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        if kind != "adam":
            w = w - rate * decay * w
        direction = m / (1 - b1**t)
        rho = limit - 2 * t * b2**t / (1 - b2**t)
        if kind != "radam":
            direction = direction / (np.sqrt(v / (1 - b2**t)) + epsilon)
        elif rho > 5:
            r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
            direction = direction * r * np.sqrt(1 - b2**t) / (np.sqrt(v) + epsilon)
        w = w - rate * direction
    np.testing.assert_allclose(steps_of(kind, gradients), w, rtol=1e-12)


def test_8_bits_without_their_package_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="bitsandbytes, and that is not installed: pip install 'raytriever"):
        build_optimizer(TinyEncoder(), OptimizerSettings(kind="adamw_8bit"))


class Wide(nn.Module):
    """A matrix large enough for 8 bits, and a bias that isn't."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 128)


def steps_of_wide(module: Wide, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("kind", "decay"), [("adamw", 0.1), ("adam", 0.0)])
def test_8_bits_stay_near_32(kind, decay):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    found, expected = Wide(), Wide()
    for module, name in ((found, "adamw_8bit"), (expected, kind)):
        optimizer = build_optimizer(module, OptimizerSettings(kind=name, learning_rate=0.01, weight_decay=decay))
        steps_of_wide(module, optimizer, range(30))
    moved = (expected.linear.weight - Wide().linear.weight).abs().mean()
    apart = (found.linear.weight - expected.linear.weight).abs().mean()
    assert 0 < apart < 0.05 * moved
    torch.testing.assert_close(found.linear.bias, expected.linear.bias, rtol=1e-5, atol=1e-6)


def test_8_bits_resume_exactly(tmp_path):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    settings = OptimizerSettings(kind="adamw_8bit", learning_rate=0.01, weight_decay=0.1)
    whole = Wide()
    optimizer = build_optimizer(whole, settings)
    steps_of_wide(whole, optimizer, range(5))
    with Checkpoints(str(tmp_path), {}) as checkpoints:
        checkpoints.save(State(5), whole, optimizer)
    assert optimizer.state[whole.linear.weight]["state1"].dtype == torch.uint8
    steps_of_wide(whole, optimizer, range(5, 12))
    resumed = Wide()
    optimizer = build_optimizer(resumed, settings)
    assert Checkpoints(str(tmp_path), {}).restore(resumed, optimizer) == State(5)
    steps_of_wide(resumed, optimizer, range(5, 12))
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.999)},
        {"betas": (0.9, math.nan)},
        {"learning_rate": math.inf},
        {"learning_rate": math.nan},
        {"weight_decay": math.inf},
        {"epsilon": math.inf},
    ],
    ids=str,
)
def test_numbers_that_no_optimizer_takes_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        OptimizerSettings(**wrong)


@pytest.mark.parametrize("kind", ["adamw", "adam", "radam"])
def test_betas_at_their_bound_are_taken(kind):
    build_optimizer(TinyEncoder(), OptimizerSettings(kind=kind, betas=(0.0, 0.0)))


@pytest.mark.parametrize("kind", ["adamw", "adam"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_weights_are_updated_in_one_kernel(kind: str, device: str):
    module = nn.Module()
    with FakeTensorMode():
        module.weight, module.bias = (nn.Parameter(torch.empty(2, device=device)) for _ in range(2))
    optimizer = build_optimizer(module, OptimizerSettings(kind=kind))
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
