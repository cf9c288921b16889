"""The settings of a training run."""

from typing import Any, Literal

from pydantic import Field

from raytriever.settings.configuration import Settings
from retrieval.encoders.specification import has_bfloat16
from trainers.engine.optimization import OptimizerSettings, ScheduleSettings


class TrainingSettings(Settings):
    """How long to train, on how much at once, with which optimizer.

    A step's loss is the mean over its batches.
    """

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)  # ends the run earlier than its epochs would
    batches_per_step: int = Field(default=1, ge=1)  # over all ranks
    group_by_length: bool = False  # steps of batches that take equally long, so that ranks wait less for one another
    hard_negatives: int | None = Field(default=None, ge=0)  # drawn from a row's anew each epoch; None: all of them
    bf16: bool | Literal["auto"] = "auto"  # 'auto': where the processor has it
    checkpoint_every: int = Field(default=500, ge=1)  # steps; the last step makes one too
    seed: int = Field(default=0, ge=0)
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()

    def resolved(self, *, gpu: bool = False) -> "TrainingSettings":
        """The same with ``bf16`` decided by this machine's processor, or ``gpu``: by one process, for all ranks."""
        return self if self.bf16 != "auto" else self.model_copy(update={"bf16": has_bfloat16(gpu=gpu)})

    def recorded(self, *without: str) -> dict[str, Any]:
        """JSON values of all but these settings, as configurations are stored: no ``group_by_length`` if unset."""
        unset = () if self.group_by_length else ("group_by_length",)
        return self.model_dump(mode="json", exclude={*without, *unset})

    def shaping(self, total_steps: int) -> dict[str, Any]:
        """The settings that the weights after a given step depend on, which a resumed run must share.

        The run's length counts only where the schedule depends on it, so that other runs can be prolonged.
        """
        values = self.recorded("epochs", "max_steps", "checkpoint_every")
        return values | ({"total_steps": total_steps} if self.schedule.depends_on_length else {})
