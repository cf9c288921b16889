"""A training step in bfloat16 on the device against the same step in float32 on the CPU, for every objective."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.devices import CUDA
from tests.gpu.objectives import KINDS, ONE_OF_EACH, make_objective, make_rows
from trainers.engine.optimization import build_optimizer
from trainers.engine.order import Order
from trainers.engine.settings import OptimizerSettings, TrainingSettings
from trainers.engine.step import compute_gradients
from trainers.objective import Objective, pinned
from trainers.objectives import multi_layer

PIECES = 2
ROOT = Path(__file__).parents[2]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """On the CPU in float64; without those of a key's bias, which are rounding errors."""
    return {
        name: parameter.grad.detach().double().cpu()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not name.endswith("key.bias")
    }


def step(objective: Objective[Any], name: str, bf16: bool) -> dict[str, Any]:
    """Leaves a step's gradients in the parameters."""
    order = Order([PIECES], PIECES, seed=0)
    settings = TrainingSettings(batches_per_step=PIECES, bf16=bf16, optimizer=OptimizerSettings(max_grad_norm=None))
    first = next(iter(order.steps()))
    objective.train()
    device = next(objective.parameters()).device
    collated = [pinned(objective.collate(make_rows(name, number)), device) for number in range(PIECES)]
    return compute_gradients(objective, first, collated, order, settings, "made up")


def cosine(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    left, right = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    return float(nn.functional.cosine_similarity(left, right, dim=0))


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "lora"])
def test_bfloat16_is_near_float32(
    device: torch.device, tiny_encoder: Path, name: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    winners: list[Tensor] = []
    choose = multi_layer.best_vector

    def note(similarities: Tensor, reduced: multi_layer.Reduced) -> Tensor:
        winners.append(choose(similarities, reduced))
        return winners[-1]

    monkeypatch.setattr(multi_layer, "best_vector", note)
    reference = make_objective(name, tiny_encoder, lora)
    expected = step(reference, name, bf16=False)
    # the better of two nearly equal vectors may be the other one in bfloat16, and then has all of the gradient
    monkeypatch.setattr(multi_layer, "best_vector", lambda similarities, _: winners.pop(0).to(similarities.device))
    objective = make_objective(name, tiny_encoder, lora).to(device)
    found = step(objective, name, bf16=True)
    assert not winners
    monkeypatch.setattr(multi_layer, "best_vector", choose)
    gradients, wanted = gradients_of(objective), gradients_of(reference)
    assert {p.grad.dtype for p in objective.parameters() if p.grad is not None} == {torch.float32}
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=5e-2)
    assert cosine(gradients, wanted) > 0.99
    for key, gradient in wanted.items():
        if gradient.norm() > 1e-3 * expected["gradient_norm"]:
            assert cosine({key: gradients[key]}, {key: gradient}) > 0.98, key
    optimizer = build_optimizer(objective, OptimizerSettings(learning_rate=1e-3))
    before = {key: value.detach().clone() for key, value in objective.named_parameters()}
    optimizer.step()
    moved = {key for key, value in objective.named_parameters() if not torch.equal(value, before[key])}
    assert moved >= {key for key, gradient in gradients.items() if gradient.any()}  # LoRA's A has none at first
    assert moved <= {key for key, value in objective.named_parameters() if value.requires_grad}
    assert step(objective, name, bf16=True)["loss"] != found["loss"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_float32_on_the_device_is_float32(device: torch.device, tiny_encoder: Path, name: str) -> None:
    reference = make_objective(name, tiny_encoder)
    expected = step(reference, name, bf16=False)
    objective = make_objective(name, tiny_encoder).to(device)
    found = step(objective, name, bf16=False)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found.keys() == expected.keys()
    assert cosine(gradients_of(objective), gradients_of(reference)) > 0.9999


@pytest.mark.slow
def test_they_need_neither_ray_nor_faiss(tiny_encoder: Path) -> None:
    """Neither to import these tests' own modules nor to take a step."""
    program = f"""
import pathlib, sys
for name in ("ray", "faiss"):
    sys.modules[name] = None  # importing it raises ImportError
import tests.gpu.test_one_rank
from tests.gpu.test_objectives import make_objective, step
step(make_objective("contrastive", pathlib.Path({str(tiny_encoder)!r}), lora=True), "contrastive", bf16=True)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
