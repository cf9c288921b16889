"""The settings of a training loop, and which of them to change where a device lacks the precision or the memory."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field

from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import Settings
from retrieval.encoders.specification import has_bfloat16
from trainers.engine.optimization import OptimizerSettings, ScheduleSettings


class TrainingSettings(Settings):
    """How long to train, on how much at once, with which optimizer.

    A step's loss is the mean over its batches.
    """

    epochs: int = Field(default=1, ge=1)
    """Epochs of the stored batches, each packed by itself."""
    max_steps: int | None = Field(default=None, ge=1)
    """Ends the run earlier than its epochs would."""
    batches_per_step: int = Field(default=1, ge=1)
    """Over all ranks."""
    group_by_length: bool = False
    """Steps of batches that take equally long, so that ranks wait less for one another."""
    hard_negatives: int | None = Field(default=None, ge=0)
    """Hard negatives drawn from each row's stored ones, anew every epoch; null: all of them."""
    bf16: bool | Literal["auto"] = "auto"
    """Bfloat16 autocast; 'auto': where the processor has it."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps; the last one makes a checkpoint too."""
    seed: int = Field(default=0, ge=0)
    """Of the order of batches and of whatever is drawn."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its peak learning rate."""
    schedule: ScheduleSettings = ScheduleSettings()
    """How the learning rate moves."""

    @property
    def precision(self) -> str:
        """In words, of what is resolved."""
        return "bfloat16 autocast" if self.bf16 else "float32"

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


def require_precision(training: TrainingSettings, device: torch.device) -> None:
    """Warns where a CPU computes in the run's precision slowly. A worker calls it before it trains.

    ``training.bf16`` is resolved: the driver chose it for all workers, whose processors it may not have seen. Raises
    ``UserError`` where it is on and the GPU has no bfloat16 instructions, so that it would emulate them.
    """
    if training.bf16 is not True or device.type not in ("cuda", "cpu") or has_bfloat16(gpu=device.type == "cuda"):
        return
    host = socket.gethostname()
    if device.type == "cuda":
        raise UserError(
            f"training.bf16 is on (by 'auto' where a GPU is asked for), but the {torch.cuda.get_device_name(device)} of"
            f" {host} has no bfloat16 instructions and would emulate them. Set training.bf16 to false, or train on GPUs"
            " that have them (compute capability 8.0 or higher: A100, L4, H100 and the like)."
        )
    log.info(
        f"  Warning: training.bf16 is on, but the CPU of {host} has no bfloat16 instructions and emulates them, which"
        " is slower than float32. Set training.bf16 to false."
    )


@contextmanager
def naming_full_memory(settings: Mapping[str, Any]) -> Iterator[None]:
    """Around a run of these ``settings``: where a GPU's memory is full, a ``UserError`` that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_message(error, settings)) from error


def out_of_memory_message(error: BaseException, settings: Mapping[str, Any]) -> str:
    """What was asked for, and the settings that need less memory: first those with which the run goes on.

    With the others it would train other weights, so that it begins anew. Both come the cheapest first. ``error``:
    torch's ``OutOfMemoryError``; ``settings``: a training run's, dumped (``objective``, ``training``,
    ``activation_checkpointing``, ``lora``, ``sharding``).
    """
    message = f"The GPU's memory is full: {asked_for(error)}."
    going_on, anew = _going_on(settings), _anew(settings)
    if going_on:
        message += f" With these the run goes on from its checkpoint, the cheapest first: {_numbered(going_on, 1)}."
    return message + (
        f" With these it begins anew, by --force or in another folder: {_numbered(anew, 1 + len(going_on))}."
    )


def asked_for(error: BaseException) -> str:
    """The first two sentences of torch's ``OutOfMemoryError``: what was asked for and what is free; no full stop."""
    sentences = " ".join(str(error).split()).removeprefix("CUDA out of memory. ").split(". ")
    return ". ".join(sentences[:2]).rstrip(".")


def _numbered(advice: list[str], first: int) -> str:
    return "; ".join(f"({number}) {what}" for number, what in enumerate(advice, start=first))


def _going_on(settings: Mapping[str, Any]) -> list[str]:
    """What changes no bit of a weight, or is how a checkpoint may be continued anyway."""
    objective, advice = settings.get("objective", {}), []
    chunk_size = objective.get("chunk_size")
    if chunk_size and objective.get("gradient_cache") is False:
        advice.append(
            f"set objective.gradient_cache to true: memory then grows with the chunk (chunk_size {chunk_size}), not"
            " with the batch"
        )
    if not settings.get("activation_checkpointing"):
        advice.append("set activation_checkpointing to true, which changes no gradient")
    if settings.get("sharding") == "replicated":
        advice.append("set sharding to 'sharded' where there are several GPUs")
    return advice


def _anew(settings: Mapping[str, Any]) -> list[str]:
    objective, training, advice = settings.get("objective", {}), settings.get("training", {}), []
    chunk_size = objective.get("chunk_size")
    if "chunk_size" in objective and chunk_size is None:
        advice.append(
            "set objective.gradient_cache to true with objective.chunk_size 32: memory then grows with the chunk, not"
            " with the batch"
        )
    elif objective.get("gradient_cache") and chunk_size > 1:
        advice.append(f"lower objective.chunk_size (now {chunk_size}), which changes a gradient by rounding alone")
    if training.get("bf16") is False:
        advice.append("set training.bf16 to true")
    if settings.get("lora") is None:
        advice.append("train a LoRA adapter (lora), whose optimizer needs little")
    advice.append(
        "cut texts shorter (the encoder's max_length), or pack smaller batches, and take more of them a step"
        " (training.batches_per_step)"
    )
    return advice
