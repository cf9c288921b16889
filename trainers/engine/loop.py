"""The training loop. It knows no objective and none of its callbacks: it takes steps, validates, keeps checkpoints."""

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from raytriever.errors import UserError
from raytriever.prefetching import TOKENIZING_THREADS, prefetched
from raytriever.reports.log import log
from trainers.engine import collectives
from trainers.engine.callback import Callback
from trainers.engine.checkpoint import Checkpoints, require_common_start
from trainers.engine.early_stopping import Criterion, Evaluation, State, Trained, deciding_values, should_stop
from trainers.engine.optimization import build_optimizer, learning_rate
from trainers.engine.reading import BatchSource, Reader, run_order
from trainers.engine.settings import TrainingSettings, require_evaluations, require_room_for_warmup
from trainers.engine.sharding import whole_weights
from trainers.engine.step import compute_gradients
from trainers.estimate.machines import seconds_at_peak
from trainers.objective import Objective

_STEPS_READ_AHEAD = 3
_MEASURES_SHOWN = 4


class Validation(Protocol):
    """Measures an objective on data that it isn't trained on, on all ranks together.

    ``every``: steps between evaluations. ``patience``: evaluations in a row without improvement before the run ends,
    None for no end. ``criteria``: the deciding measures, with their first steps.
    """

    @property
    def every(self) -> int: ...
    @property
    def patience(self) -> int | None: ...
    @property
    def criteria(self) -> Sequence[Criterion]: ...
    def measure(self, objective: Objective[Any]) -> dict[str, float]: ...


def train(
    objective: Objective[Any],
    batches: BatchSource,
    settings: TrainingSettings,
    *,
    validation: Validation | None = None,
    checkpoints: Checkpoints | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Trains ``objective`` in place on its own device. Resumes from the last checkpoint if there is one.

    With ``validation`` it ends as it was at its best evaluation, which needs ``checkpoints``. Every rank of the default
    process group (if any) calls it with the same arguments, except ``callbacks``, which are the rank's own. Raises
    ``UserError`` for settings that don't fit one another, batches that don't fit the objective, checkpoints of a
    different run, and a loss that is not finite.
    """
    order = run_order(objective, batches, settings)
    _check_settings(settings, order.total_steps, evaluated=validation is not None)
    objective.batch_group = collectives.neighbours(order.ranks_per_loss)
    optimizer = build_optimizer(objective, settings.optimizer)
    state = State(0)
    if checkpoints:
        checkpoints = checkpoints.of_run(settings.shaping(order.total_steps), batches.fingerprint)
        state = checkpoints.restore(objective, optimizer)
        require_common_start(state.steps, order.total_steps, next(objective.parameters()).device)
    collectives.broadcast_weights(objective)
    if validation and state.steps == 0:
        state = _evaluated(state, validation, objective, callbacks)
    objective.train()
    reader = Reader(batches, objective, settings.seed, settings.hard_negatives)
    at_peak = seconds_at_peak(objective, settings)
    remaining = iter(()) if _stops(state, validation) else order.steps(state.steps)
    clock = time.perf_counter()
    ahead = prefetched(reader.read_step, remaining, _STEPS_READ_AHEAD, TOKENIZING_THREADS)
    with checkpoints or nullcontext(), closing(ahead) as steps:
        for step, collated in steps:
            waited = time.perf_counter() - clock
            rate = _set_learning_rate(optimizer, step.number, order.total_steps, settings, state, validation)
            measured = compute_gradients(objective, step, collated, order, settings, batches.uri)
            optimizer.step()
            done = step.number + 1
            point = {"step": done, "epoch": step.epoch, "learning_rate": rate, **measured}
            point |= {"seconds": time.perf_counter() - clock, "waiting_seconds": waited}
            point |= {"peak_seconds": at_peak * point["tokens"]} if at_peak else {}
            for callback in callbacks:
                callback.on_step(point)
            state = replace(state, steps=done)
            last = done == order.total_steps
            if validation and (last or done % validation.every == 0):
                state = _evaluated(state, validation, objective, callbacks)
            if checkpoints and (last or done % settings.checkpoint_every == 0 or state.was_evaluated):
                for callback in callbacks:
                    callback.on_checkpoint(done)
                checkpoints.save(state, objective, optimizer)
            if _stops(state, validation):
                break
            clock = time.perf_counter()  # neither validation nor checkpoint is the next step's time or its waiting
    if checkpoints and state.best_step is not None and state.best_step != state.steps:
        checkpoints.restore_weights(state.best_step, objective)
    return Trained(order.total_steps, state, tuple(validation.criteria) if validation else ())


def _check_settings(settings: TrainingSettings, total_steps: int, *, evaluated: bool) -> None:
    if settings.bf16 == "auto":
        raise UserError("bf16 is still 'auto' when training starts: resolve it for all ranks, or set true or false.")
    require_evaluations(settings.schedule, evaluated=evaluated)
    require_room_for_warmup(settings.schedule, total_steps)


def _set_learning_rate(
    optimizer: torch.optim.Optimizer,
    step: int,
    total_steps: int,
    settings: TrainingSettings,
    state: State,
    validation: Validation | None,
) -> float:
    past = deciding_values(state.evaluations, validation.criteria) if validation else []
    rate = learning_rate(step, total_steps, settings.optimizer.learning_rate, settings.schedule, past)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _evaluated(state: State, validation: Validation, objective: Objective[Any], callbacks: Sequence[Callback]) -> State:
    """``state`` with an evaluation of now."""
    started = time.perf_counter()
    with whole_weights(objective):
        measures = validation.measure(objective)
    evaluation = Evaluation(state.steps, measures, time.perf_counter() - started)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in list(measures.items())[:_MEASURES_SHOWN])
    log.info(f"  after {state.steps:,} steps: {shown} ({evaluation.seconds:.1f} s)")
    for callback in callbacks:
        callback.on_evaluation(evaluation)
    return state.judged((*state.evaluations, evaluation), validation.criteria)


def _stops(state: State, validation: Validation | None) -> bool:
    return validation is not None and should_stop(state.evaluations, validation.criteria, validation.patience)
