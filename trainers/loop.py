"""The training loop. It knows no objective: it hands out batches, takes steps and keeps checkpoints."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from raytriever.retrieval.errors import UserError
from raytriever.trainers import collectives
from raytriever.trainers.checkpoint import Checkpoints
from raytriever.trainers.objective import Objective
from raytriever.trainers.optimization import build_optimizer
from raytriever.trainers.order import Order, Step
from raytriever.trainers.reading import BatchSource, prefetched, read_step
from raytriever.trainers.schedule import learning_rate, require_room_for_warmup
from raytriever.trainers.settings import TrainingSettings
from raytriever.trainers.step import Measured, compute_gradients

_STEPS_READ_AHEAD = 3


@dataclass(frozen=True)
class StepReport:
    """One step, all ranks taken together; ``step`` counts from 1, ``epoch`` from 0, seconds are wall-clock.

    ``waiting_seconds`` is the part of ``seconds`` spent waiting for data; ``measured.gradient_norm`` is
    before clipping.
    """

    step: int
    total_steps: int
    epoch: int
    learning_rate: float
    seconds: float
    waiting_seconds: float
    measured: Measured


def train(
    objective: Objective[Any],
    batches: BatchSource,
    settings: TrainingSettings,
    *,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[StepReport], None] = lambda _: None,
    on_checkpoint: Callable[[int], None] = lambda _: None,
) -> Order:
    """Trains ``objective`` in place on its own device, from the last checkpoint on if there is one.

    Returns the order of its steps. Every rank of the default process group (if any) calls it with the same
    arguments; ``on_step`` and ``on_checkpoint`` (which gets the steps done, once the checkpoint is complete)
    are called on every rank. Raises ``UserError`` for settings that don't fit one another, batches that don't
    fit the objective, checkpoints of a different run, and a loss that is not finite.
    """
    if settings.bf16 == "auto":
        raise UserError("bf16 is still 'auto' where training starts: resolve it for all ranks, or set true or false.")
    counts = [batches.number_of_batches(epoch) for epoch in range(settings.epochs)]
    ranks, rank = collectives.world_size(), collectives.rank()
    order = Order(counts, settings.batches_per_step, settings.seed, ranks, rank, settings.max_steps)
    require_room_for_warmup(settings.schedule, order.total_steps)
    _join_slices(objective, order)
    optimizer = build_optimizer(objective, settings.optimizer)
    start = 0
    if checkpoints:
        checkpoints = checkpoints.of_run(settings.shaping(order.total_steps), batches.fingerprint, ranks)
        start = checkpoints.restore(objective, optimizer)
        _check_start(start, order.total_steps, next(objective.parameters()).device)
    collectives.broadcast_weights(objective)

    def read(step: Step) -> list[Any]:
        return read_step(batches, objective, step)

    objective.train()
    clock = time.perf_counter()
    with closing(prefetched(read, order.steps(start), _STEPS_READ_AHEAD)) as steps:
        for step, collated in steps:
            waited = time.perf_counter() - clock
            rate = learning_rate(step.number, order.total_steps, settings.optimizer.learning_rate, settings.schedule)
            for group in optimizer.param_groups:
                group["lr"] = rate
            measured = compute_gradients(objective, step, collated, order, settings, batches.uri)
            optimizer.step()
            done = step.number + 1
            now = time.perf_counter()
            on_step(StepReport(done, order.total_steps, step.epoch, rate, now - clock, waited, measured))
            clock = now
            if checkpoints and (done % settings.checkpoint_every == 0 or done == order.total_steps):
                if rank == 0:
                    checkpoints.save(done, objective, optimizer)
                collectives.barrier()
                on_checkpoint(done)
                clock = time.perf_counter()  # neither the next step's time nor its waiting
    return order


def _join_slices(objective: Objective[Any], order: Order) -> None:
    if order.slices_per_batch > 1 and not objective.accepts_slices:
        raise UserError(
            f"{collectives.world_size()} ranks share {order.batches_per_step} batches a step, so each batch"
            f" would be cut into {order.slices_per_batch} slices, which {type(objective).__name__} can't"
            " train on. Set batches_per_step to a multiple of the ranks, or use fewer ranks."
        )
    objective.batch_group = collectives.neighbours(order.slices_per_batch)


def _check_start(start: int, total_steps: int, device: torch.device) -> None:
    starts = collectives.gather(torch.tensor([start], device=device)).tolist()
    if len(set(starts)) > 1:
        raise UserError(
            f"The ranks found different checkpoints (steps {', '.join(map(str, starts))}). The checkpoints'"
            " folder must be one that all machines share: a network file system, s3:// or gs://."
        )
    if start > total_steps:
        raise UserError(
            f"The newest checkpoint was made after {start} steps, but this run has only {total_steps}. Train for"
            " at least as long (epochs, max_steps), or into another folder."
        )
