"""The whole loop against one written out in plain torch: what its settings say happens to the weights, all of it."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines.batches import epoch_permutation
from tests.unit.trainers.tiny import Reports, TinyBatches, tiny_objective, tiny_settings, weights_of
from trainers.engine.draws import draw_hard_negatives
from trainers.engine.loop import train
from trainers.engine.order import Order, seed_randomness
from trainers.engine.settings import OptimizerSettings, ScheduleSettings
from trainers.objectives.contrastive import Contrastive

DROPOUT = 0.3
COUNTS = (5, 4)
# no default, and an epsilon that shows
SEED, PEAK, DECAY, LIMIT, WARMUP, BETAS, EPSILON = 3, 0.02, 0.1, 0.5, 1, (0.8, 0.95), 1e-2
OPTIMIZER = {"learning_rate": PEAK, "weight_decay": DECAY, "max_grad_norm": LIMIT, "betas": BETAS, "epsilon": EPSILON}


def rows_of(batches: TinyBatches, epoch: int, number: int, objective: Contrastive) -> pa.Table:
    rows = draw_hard_negatives(batches.read(epoch, number), 1, SEED, epoch)
    for name, value in (("batch", number), ("epoch", epoch)):
        rows = rows.append_column(name, pa.array([value] * len(rows), pa.int32()))
    return rows.select(list(objective.columns))


def written_out() -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """AdamW, its rate, clipping, what decays, dropout, drawn negatives, batches in order: each by its formula.

    The weights, and what each step measures: the means of its batches, and the sum of their tokens.
    """
    objective, batches = tiny_objective(DROPOUT).train(), TinyBatches(COUNTS)
    weights = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
    decaying = {name for name in weights if name.endswith("weight") and ".norm." not in name}
    first, second = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    total, points = sum(count // 2 for count in COUNTS), list[dict[str, float]]()
    for number, step in enumerate(Order(COUNTS, 2, SEED).steps()):
        place = (number - (COUNTS[0] // 2 if step.epoch else 0)) * 2
        pair = epoch_permutation(SEED, step.epoch, COUNTS[step.epoch])[place : place + 2].tolist()
        assert [list(piece.batches) for piece in step.pieces] == [[batch] for batch in pair]
        objective.zero_grad()
        figures = defaultdict[str, float](float)
        for piece, batch in zip(step.pieces, pair, strict=True):
            collated = objective.collate(rows_of(batches, step.epoch, batch, objective))
            seed_randomness(SEED, step, piece)
            outcome = objective(collated)
            (outcome.loss / 2).backward()
            for name, value in (outcome.metrics | {"loss": outcome.loss}).items():
                figures[name] += value.item() / 2
            figures["tokens"] += outcome.tokens
        norm = math.sqrt(sum(float((weight.grad.double() ** 2).sum()) for weight in weights.values()))
        rate = PEAK * (number + 1) / WARMUP if number < WARMUP else PEAK * (1 - (number - WARMUP) / (total - WARMUP))
        points.append({"learning_rate": rate, "gradient_norm": norm, **figures})
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = weight.grad * min(1.0, LIMIT / (norm + 1e-6))
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
                corrected = [
                    m / (1 - beta ** (number + 1)) for m, beta in ((first[name], BETAS[0]), (second[name], BETAS[1]))
                ]
                if name in decaying:
                    weight *= 1 - rate * DECAY
                weight -= rate * corrected[0] / (corrected[1].sqrt() + EPSILON)
    return weights_of(objective), points


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def trained(dropout: float = DROPOUT, **changes: Any) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """By the loop, from an objective in evaluation mode, as pretrained encoders are loaded."""
    optimizer = OptimizerSettings(**(OPTIMIZER | changes.pop("optimizer", {})))
    schedule = ScheduleSettings(**({"kind": "linear", "warmup_steps": WARMUP} | changes.pop("schedule", {})))
    settings = tiny_settings(**({"hard_negatives": 1, "seed": SEED} | changes), optimizer=optimizer, schedule=schedule)
    objective, points = tiny_objective(dropout).eval(), list[dict[str, Any]]()
    train(objective, TinyBatches(COUNTS), settings, callbacks=[Reports(on_step=points.append)])
    return weights_of(objective), points


def test_a_run_is_the_loop_written_out() -> None:
    found, points = trained()
    expected, steps = written_out()
    assert farthest(found, expected) < 2e-5
    assert farthest(found, weights_of(tiny_objective(DROPOUT))) > 10 * PEAK * WARMUP / 8
    for point, step in zip(points, steps, strict=True):
        assert {name: point[name] for name in step} == pytest.approx(step, rel=1e-5)
        assert point["gradient_norm"] > LIMIT  # so that clipping shows


@pytest.mark.parametrize("changed", [
    {"dropout": 0.0},
    {"hard_negatives": None},
    {"seed": 4},
    {"epochs": 1},
    {"max_steps": 3},
    {"batches_per_step": 1},
    {"optimizer": {"learning_rate": PEAK * 1.01}},
    {"optimizer": {"weight_decay": 0.0}},
    {"optimizer": {"betas": (0.8, 0.9)}},
    {"optimizer": {"betas": (0.7, 0.95)}},
    {"optimizer": {"epsilon": 1e-6}},
    {"optimizer": {"max_grad_norm": None}},
    {"optimizer": {"kind": "adam"}},
    {"optimizer": {"kind": "radam"}},
    {"schedule": {"warmup_steps": 2}},
    {"schedule": {"kind": "constant"}},
    {"schedule": {"minimum": 0.5}},
], ids=str)  # fmt: skip
def test_every_setting_of_a_training_changes_the_weights(changed: dict[str, Any]) -> None:
    assert farthest(trained()[0], trained(**changed)[0]) > 1e-4
