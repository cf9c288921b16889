"""The learning rate as a pure function of the step."""

from typing import Literal, Self

from pydantic import Field, model_validator

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError


class ScheduleSettings(Settings):
    """How the learning rate moves: up over ``warmup_steps``, then level, to zero, or by a factor a step."""

    kind: Literal["constant", "linear", "exponential"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    decay: float | None = Field(default=None, gt=0, le=1)  # factor a step, for 'exponential'

    @model_validator(mode="after")
    def _decay_belongs_to_exponential(self) -> Self:
        if (self.decay is None) == (self.kind == "exponential"):
            raise ValueError("decay is the factor a step of kind 'exponential': needed there, meaningless elsewhere")
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step depends on how many steps the run has."""
        return self.kind == "linear"


def learning_rate(step: int, total_steps: int, peak: float, settings: ScheduleSettings) -> float:
    """The rate of ``step`` (0-based) in a run of ``total_steps``.

    Warm-up: peak (step + 1) / warmup_steps, so its last step is at the peak and none is wasted at zero. After
    it, with t = step - warmup_steps: constant is peak, linear is peak (1 - t / (total_steps - warmup_steps)),
    exponential is peak decay^t.
    """
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    after = step - settings.warmup_steps
    if settings.kind == "linear":
        return peak * (1 - after / (total_steps - settings.warmup_steps))
    if settings.decay is not None:
        return peak * settings.decay**after
    return peak


def require_room_for_warmup(settings: ScheduleSettings, total_steps: int) -> None:
    """Raises ``UserError`` where the run ends before its warm-up does."""
    if settings.warmup_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps is {settings.warmup_steps}, but the run has only {total_steps} steps, so"
            " it would end before the learning rate reaches its peak. Lower warmup_steps, or train longer"
            " (epochs, max_steps)."
        )
