"""The learning rate as a pure function of the step and of what the run measured so far."""

import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError
from raytriever.trainers.early_stopping import Criterion, DecidingValue

_BELONGS_TO = {
    "decay": ("exponential",),
    "minimum": ("linear", "plateau"),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "threshold": ("plateau",),
    "cooldown": ("plateau",),
}


class ScheduleSettings(Settings):
    """How the learning rate moves: up in a warm-up, then level, towards zero, by a factor a step, or on a plateau.

    The warm-up lasts ``warmup_steps``, or ``warmup_ratio`` of the run's steps (rounded up). ``decay``: factor a step,
    of kind 'exponential'. ``minimum``: the share of the peak that 'linear' ends at and 'plateau' stays above.

    Of kind 'plateau', which goes by the evaluations of the run: ``factor`` multiplies the rate after more than
    ``patience`` evaluations without an improvement by ``threshold`` of the best; the next ``cooldown`` evaluations
    don't count as bad ones.
    """

    kind: Literal["constant", "linear", "exponential", "plateau"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    decay: float | None = Field(default=None, gt=0, le=1)
    minimum: float = Field(default=0.0, ge=0, le=1)
    factor: float = Field(default=0.5, gt=0, lt=1)
    patience: int = Field(default=3, ge=0)
    threshold: float = Field(default=1e-4, ge=0)
    cooldown: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        if self.kind == "exponential" and self.decay is None:
            raise ValueError("kind 'exponential' needs decay, the factor a step (0.9999, say)")
        for name, kinds in _BELONGS_TO.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to kind {' or '.join(map(repr, kinds))}, not to {self.kind!r}")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                "warmup_steps and warmup_ratio both say how long the warm-up is: give one of them, and set the other to"
                " 0 (warmup_steps) or null (warmup_ratio)"
            )
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step depends on how many steps the run has."""
        return self.kind == "linear" or bool(self.warmup_ratio)

    def steps_of_warmup(self, total_steps: int) -> int:
        """Steps until the peak in a run of ``total_steps``."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * total_steps)


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    settings: ScheduleSettings,
    evaluations: Sequence[DecidingValue] = (),
) -> float:
    """The rate of ``step`` (0-based) in a run of ``total_steps``.

    Warm-up: peak (step + 1) / warm-up steps, so its last step is at the peak and none is wasted at zero. After
    it, with t = step - warm-up steps: constant is peak, linear is peak (1 - (1 - minimum) t / (total_steps -
    warm-up steps)), exponential is peak decay^t, plateau is peak times ``plateau_fraction`` of those of
    ``evaluations`` (in order of their steps) that were made before the step.
    """
    warmup = settings.steps_of_warmup(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    after = step - warmup
    if settings.kind == "linear":
        return peak * (1 - (1 - settings.minimum) * after / (total_steps - warmup))
    if settings.kind == "plateau":
        past = [evaluation for evaluation in evaluations if evaluation[0] <= step]
        return peak * plateau_fraction(past, warmup, settings)
    if settings.decay is not None:
        return peak * settings.decay**after
    return peak


def plateau_fraction(evaluations: Sequence[DecidingValue], warmup: int, settings: ScheduleSettings) -> float:
    """The share of the peak that is left after ``evaluations``: torch's ``ReduceLROnPlateau``, relative threshold.

    Evaluations before the end of the warm-up are no bad ones, but an improvement is one over them too. Under a later
    criterion the best so far and the bad ones in a row start anew: its measure has another scale.
    """
    fraction, bad, cooling = 1.0, 0, 0
    best = math.nan
    in_hand: Criterion | None = None
    for step, value, criterion in evaluations:
        higher_is_better = criterion.higher_is_better
        if criterion != in_hand:
            best, bad, in_hand = (-math.inf if higher_is_better else math.inf), 0, criterion
        margin = 1 + settings.threshold if higher_is_better else 1 - settings.threshold
        if (value > best * margin) if higher_is_better else (value < best * margin):
            best, bad = value, 0
        elif step >= warmup:
            bad += 1
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > settings.patience:
            fraction = max(fraction * settings.factor, settings.minimum)
            cooling, bad = settings.cooldown, 0
    return fraction


def starts_anew_later(settings: ScheduleSettings, criteria: int) -> bool:
    """Whether the rate goes by more than one of a run's ``criteria``, each of which starts anew.

    The rate of such a run went otherwise before each did, so the version of its algorithm is one higher than others'.
    """
    return settings.kind == "plateau" and criteria > 1


def require_room_for_warmup(settings: ScheduleSettings, total_steps: int) -> None:
    """Raises ``UserError`` where the run ends before its warm-up does."""
    warmup = settings.steps_of_warmup(total_steps)
    if warmup >= total_steps:
        given = "warmup_steps is" if settings.warmup_ratio is None else f"warmup_ratio {settings.warmup_ratio} makes it"
        raise UserError(
            f"schedule.{given} {warmup}, but the run has only {total_steps} steps, so"
            " it would end before the learning rate reaches its peak. Lower it, or train longer (epochs, max_steps)."
        )


def require_evaluations(settings: ScheduleSettings, *, evaluated: bool) -> None:
    """Raises ``UserError`` where the rate goes by evaluations and the run makes none."""
    if settings.kind == "plateau" and not evaluated:
        raise UserError("schedule.kind 'plateau' goes by evaluations, and the run has none: set validation too.")
