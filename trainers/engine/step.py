"""One step: the gradients of its pieces, summed over the ranks, and the figures of the step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raytriever.errors import UserError
from trainers.engine import collectives
from trainers.engine.optimization import trainable_parameters
from trainers.engine.order import Order, Step, seed_randomness
from trainers.engine.precision import arithmetic
from trainers.engine.settings import TrainingSettings
from trainers.engine.sharding import clip_gradients, end_step, equal_passes, is_sharded
from trainers.objective import Objective, Outcome, to_device


def compute_gradients(
    objective: Objective[Any], step: Step, collated: Sequence[Any], order: Order, settings: TrainingSettings, uri: str
) -> dict[str, Any]:
    """Leaves the gradient of the step's mean loss in the parameters: equal on all ranks, its norm clipped.

    ``collated`` are this rank's batches, ``uri`` names the stored ones. Returns what the step measured over all ranks:
    ``loss`` and the objective's metrics (means over its pieces), ``gradient_norm`` before clipping, ``examples`` and
    ``tokens``. Raises ``UserError`` on every rank where a loss or the gradient is not finite.
    """
    parameters = list(trainable_parameters(objective).values())
    device = parameters[0].device
    objective.zero_grad(set_to_none=True)
    sharded = is_sharded(objective)
    outcomes = []
    with collectives.GradientSum(parameters, settings.exchanged) as total, arithmetic(settings, device):
        for piece, batch in zip(step.pieces, collated, strict=True):
            seed_randomness(settings.seed, step, piece)
            moved = to_device(batch, device)
            if sharded:
                moved = equal_passes(moved, device)
            is_last = piece is step.pieces[-1]
            objective.may_hold = is_last and not sharded and collectives.world_size() > 1
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16 is True):
                outcome: Outcome = objective(moved)
            objective.may_hold = False
            outcome.backward(order.pieces_per_step, before_last=total.start if is_last else None)
            outcomes.append(replace(outcome, loss=outcome.loss.detach(), held=None))
        if sharded:
            end_step(objective)
    norm = clip_gradients(parameters, settings.optimizer.max_grad_norm)
    return _measure(outcomes, norm, step, order, uri)


def _measure(outcomes: Sequence[Outcome], norm: Tensor, step: Step, order: Order, uri: str) -> dict[str, Any]:
    """One small tensor, a row a piece, crosses the ranks and reaches the CPU: one synchronisation a step."""
    names = sorted(outcomes[0].metrics)
    table = norm.new_zeros(order.pieces_per_step + 1, 3 + len(names), dtype=torch.float32)
    for place, outcome in zip(step.places, outcomes, strict=True):
        table[place, 0] = outcome.loss
        table[place, 1].fill_(outcome.examples)  # a number that is assigned would be copied there, and waited for
        table[place, 2].fill_(outcome.tokens)
        for column, name in enumerate(names, start=3):
            table[place, column] = outcome.metrics[name]
    table = collectives.sum_across_ranks(table)
    table[-1, 0] = norm
    *rows, (gradient_norm, *_) = table.tolist()
    for place, (loss, *_) in enumerate(rows):
        if not math.isfinite(loss):
            raise UserError(_not_finite(f"loss is {loss}", order.piece(step.batches, place).batches, step, uri))
    if not math.isfinite(gradient_norm):
        raise UserError(_not_finite(f"norm of the gradient is {gradient_norm}", step.batches, step, uri))
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    examples, tokens = (round(sum(row[column] for row in rows)) for column in (1, 2))
    measured = {"loss": means[0], "gradient_norm": gradient_norm, "examples": examples, "tokens": tokens}
    return measured | dict(zip(names, means[3:], strict=True))


def _not_finite(what: str, batches: Sequence[int], step: Step, uri: str) -> str:
    listed = f"batch {batches[0]}" if len(batches) == 1 else f"batches {', '.join(map(str, batches))}"
    remedy = "lower training.optimizer.learning_rate, lengthen the warm-up, or train into another folder without bf16"
    if step.number == 0:
        remedy = (
            "no update has been made yet, so check the model's weights (are all of them finite?), the objective's"
            " temperature (is objective.similarity_temperature too small?) and training.bf16"
        )
    return (
        f"Training stopped at step {step.number + 1}: the {what} for {listed} of epoch {step.epoch}. The weights were"
        f" not updated with it. Look at it with: raytriever show {uri} --epoch {step.epoch} --batch {batches[0]}. If"
        f" the texts are as they should be, {remedy}."
    )
