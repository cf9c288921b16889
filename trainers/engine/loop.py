"""The training loop. It knows no objective: it hands out batches, takes steps, validates and keeps checkpoints."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from raytriever.errors import UserError
from trainers.engine import collectives
from trainers.engine.checkpoint import ALGORITHM_VERSION, Checkpoints, State
from trainers.engine.early_stopping import (
    Criterion,
    Evaluation,
    best_evaluation,
    criterion_at,
    deciding_values,
    should_stop,
)
from trainers.engine.optimization import (
    build_optimizer,
    decay_spares_scalars,
    learning_rate,
    require_evaluations,
    require_room_for_warmup,
    starts_anew_later,
)
from trainers.engine.order import Order
from trainers.engine.reading import BatchSource, Reader, prefetched
from trainers.engine.settings import TrainingSettings
from trainers.engine.sharding import whole_weights
from trainers.engine.step import Measured, compute_gradients
from trainers.objective import Objective

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


class Validation(Protocol):
    """Measures an objective on data that it isn't trained on, on all ranks together.

    ``every``: steps from one evaluation to the next; ``patience``: evaluations in a row without improvement that end
    the run, None for no end; ``criteria``: what decides, from which step on.
    """

    @property
    def every(self) -> int: ...
    @property
    def patience(self) -> int | None: ...
    @property
    def criteria(self) -> Sequence[Criterion]: ...
    def measure(self, objective: Objective[Any]) -> dict[str, float]: ...


@dataclass(frozen=True)
class Trained:
    """What became of a run: the steps done, its evaluations and the criteria that judged them.

    Where it was validated, it ended as it was after ``state.best_step`` steps.
    """

    order: Order
    state: State
    criteria: tuple[Criterion, ...] = ()

    @property
    def stopped_early(self) -> bool:
        """Whether steps were left when patience was at its end."""
        return self.state.steps < self.order.total_steps

    @property
    def start(self) -> dict[str, float]:
        """What was measured before the first step; empty without validation."""
        return next((evaluation.measures for evaluation in self.state.evaluations if evaluation.step == 0), {})

    @property
    def best(self) -> tuple[Evaluation, Criterion] | None:
        """The evaluation of the state that it ended as, and what made it the best; None without validation."""
        found = best_evaluation(self.state.evaluations, self.criteria)
        return None if found is None else (found, criterion_at(self.criteria, self.state.evaluations[-1].step))


def train(
    objective: Objective[Any],
    batches: BatchSource,
    settings: TrainingSettings,
    *,
    validation: Validation | None = None,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[StepReport], None] = lambda _: None,
    on_evaluation: Callable[[Evaluation], None] = lambda _: None,
    on_checkpoint: Callable[[int], None] = lambda _: None,
) -> Trained:
    """Trains ``objective`` in place on its own device, from the last checkpoint on if there is one.

    With ``validation`` it ends as it was at its best evaluation, which needs ``checkpoints``. Every rank of the default
    process group (if any) calls it with the same arguments; ``on_step``, ``on_evaluation`` and ``on_checkpoint`` (which
    gets the steps done, just before the checkpoint is written) are called on every rank. Raises ``UserError`` for
    settings that don't fit one another, batches that don't fit the objective, checkpoints of a different run, and a
    loss that is not finite.
    """
    order = run_order(objective, batches, settings)
    _check_settings(settings, order, validation)
    objective.batch_group = collectives.neighbours(order.ranks_per_loss)
    optimizer = build_optimizer(objective, settings.optimizer)
    state = State(0)
    if checkpoints:
        checkpoints = _of_run(checkpoints, objective, batches, settings, order.total_steps, validation)
        state = _resumed(checkpoints.restore(objective, optimizer), validation, order.total_steps)
        _check_start(state.steps, order.total_steps, next(objective.parameters()).device)
    collectives.broadcast_weights(objective)
    state = _evaluated(state, validation, objective, on_evaluation) if state.steps == 0 else state
    objective.train()
    reader = Reader(batches, objective, settings.seed, settings.hard_negatives)
    remaining = iter(()) if _stops(state, validation) else order.steps(state.steps)
    clock = time.perf_counter()
    ahead = prefetched(reader.read_step, remaining, _STEPS_READ_AHEAD)
    with checkpoints or nullcontext(), closing(ahead) as steps:
        for step, collated in steps:
            waited = time.perf_counter() - clock
            rate = _learning_rate(step.number, order.total_steps, settings, state, validation)
            for group in optimizer.param_groups:
                group["lr"] = rate
            measured = compute_gradients(objective, step, collated, order, settings, batches.uri)
            optimizer.step()
            done = step.number + 1
            now = time.perf_counter()
            on_step(StepReport(done, order.total_steps, step.epoch, rate, now - clock, waited, measured))
            clock = now
            state = replace(state, steps=done)
            last = done == order.total_steps
            if validation and (last or done % validation.every == 0):
                state = _evaluated(state, validation, objective, on_evaluation)
            if checkpoints and (last or done % settings.checkpoint_every == 0 or _was_evaluated(state)):
                on_checkpoint(done)
                checkpoints.save(state, objective, optimizer, best_if_prolonged=_prolonged(state, validation).best_step)
            if _stops(state, validation):
                break
            clock = time.perf_counter()  # neither validation nor checkpoint is the next step's time or its waiting
    if checkpoints and state.best_step is not None and state.best_step != state.steps:
        checkpoints.restore_weights(state.best_step, objective)
    return Trained(order, state, tuple(validation.criteria) if validation else ())


def run_order(objective: Objective[Any], batches: BatchSource, settings: TrainingSettings) -> Order:
    """The order of a run's steps on this rank. Raises ``UserError`` where ranks, batches and objective don't fit."""
    counts = [batches.number_of_batches(epoch) for epoch in range(settings.epochs)]
    ranks, rank = collectives.world_size(), collectives.rank()
    order = Order(
        counts,
        settings.batches_per_step,
        settings.seed,
        ranks,
        rank,
        settings.max_steps,
        joined=objective.joins_step,
        lengths=batches.stored_bytes,
        group_by_length=settings.group_by_length,
    )
    if order.slices_per_batch > 1 and not objective.accepts_slices:
        raise UserError(
            f"{ranks} ranks share {order.batches_per_step} batches a step, so each batch"
            f" would be cut into {order.slices_per_batch} slices, which {type(objective).__name__} can't"
            " train on. Set batches_per_step to a multiple of the ranks, or use fewer ranks."
        )
    return order


def _check_settings(settings: TrainingSettings, order: Order, validation: Validation | None) -> None:
    if settings.bf16 == "auto":
        raise UserError("bf16 is still 'auto' where training starts: resolve it for all ranks, or set true or false.")
    require_evaluations(settings.schedule, evaluated=validation is not None)
    require_room_for_warmup(settings.schedule, order.total_steps)


def _of_run(
    checkpoints: Checkpoints,
    objective: Objective[Any],
    batches: BatchSource,
    settings: TrainingSettings,
    total_steps: int,
    validation: Validation | None,
) -> Checkpoints:
    version = ALGORITHM_VERSION + decay_spares_scalars(objective, settings.optimizer)
    version += starts_anew_later(settings.schedule, len(validation.criteria) if validation else 0)
    return checkpoints.of_run(settings.shaping(total_steps), batches.fingerprint, version)


def _learning_rate(
    step: int, total_steps: int, settings: TrainingSettings, state: State, validation: Validation | None
) -> float:
    past = deciding_values(state.evaluations, validation.criteria) if validation else []
    return learning_rate(step, total_steps, settings.optimizer.learning_rate, settings.schedule, past)


def _evaluated(
    state: State,
    validation: Validation | None,
    objective: Objective[Any],
    on_evaluation: Callable[[Evaluation], None],
) -> State:
    """``state`` with an evaluation of now."""
    if validation is None:
        return state
    started = time.perf_counter()
    with whole_weights(objective):
        measures = validation.measure(objective)
    evaluation = Evaluation(state.steps, measures, time.perf_counter() - started)
    on_evaluation(evaluation)
    return _judged(state, (*state.evaluations, evaluation), validation)


def _resumed(state: State, validation: Validation | None, total_steps: int) -> State:
    """``state`` as it was restored, for a run of ``total_steps``."""
    return state if state.steps == total_steps else _prolonged(state, validation)


def _prolonged(state: State, validation: Validation | None) -> State:
    """``state`` of a run that goes on from it: without an evaluation at the end of a shorter one.

    An uninterrupted run lacks that, so neither patience, nor the schedule, nor the choice of the best may count it.
    """
    if validation is None:
        return state
    return _judged(state, [e for e in state.evaluations if e.step % validation.every == 0], validation)


def _judged(state: State, evaluations: Sequence[Evaluation], validation: Validation) -> State:
    best = best_evaluation(evaluations, validation.criteria)
    return State(state.steps, tuple(evaluations), best.step if best else None)


def _was_evaluated(state: State) -> bool:
    return bool(state.evaluations) and state.evaluations[-1].step == state.steps


def _stops(state: State, validation: Validation | None) -> bool:
    return validation is not None and should_stop(state.evaluations, validation.criteria, validation.patience)


def _check_start(start: int, total_steps: int, device: torch.device) -> None:
    starts = collectives.gather(torch.tensor([start], device=device)).tolist()
    if len(set(starts)) > 1:
        raise UserError(
            f"The ranks found different checkpoints (steps {', '.join(map(str, starts))}). The checkpoints'"
            " folder must be one that all machines share: a network file system, s3:// or gs://."
        )
    if start > total_steps:
        raise UserError(
            f"The newest checkpoint was made after {start} steps, but this run has only {total_steps}. Give it as many"
            " (epochs, max_steps), or another folder of checkpoints."
        )
