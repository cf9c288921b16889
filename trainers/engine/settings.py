"""The settings of a training loop, and which of them to change where a device lacks the precision or the memory."""

import socket
from collections.abc import Iterator
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
    exchange_bf16: bool = False
    """Ranks send one another gradients in bfloat16 and add them up so: half the bytes, for many nodes. Where one rank
    after another adds its own, more than a hundred or so lose what is small beside the sum."""
    tf32: bool = False
    """On a GPU, a step's float32 products, the losses' too, in TensorFloat-32 (10 bits of a factor); searches and
    clusterings are not touched."""
    deterministic: bool = False
    """On a GPU, the kernels that add up in one order, so that equal runs on equal machines give equal bits; slower."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps; the last one makes a checkpoint too."""
    seed: int = Field(default=0, ge=0)
    """Of the order of batches and of whatever is drawn."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its peak learning rate."""
    schedule: ScheduleSettings = ScheduleSettings()
    """How the learning rate moves."""

    @property
    def exchanged(self) -> torch.dtype | None:
        """In what the ranks add up gradients; None: in their own precision."""
        return torch.bfloat16 if self.exchange_bf16 else None

    @property
    def precision(self) -> str:
        """In words, of what is resolved."""
        return "bfloat16 autocast" if self.bf16 else "TensorFloat-32" if self.tf32 else "float32"

    def resolved(self, *, gpu: bool = False) -> "TrainingSettings":
        """The same with ``bf16`` decided by this machine's processor, or ``gpu``: by one process, for all ranks."""
        return self if self.bf16 != "auto" else self.model_copy(update={"bf16": has_bfloat16(gpu=gpu)})

    def shaping(self, total_steps: int) -> dict[str, Any]:
        """The settings that the weights after a given step depend on, which a resumed run must share.

        The run's length counts only where the schedule depends on it, so that other runs can be prolonged.
        """
        values = self.model_dump(mode="json", exclude={"epochs", "max_steps", "checkpoint_every"})
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


IN_TRAINING = (
    "With these the run goes on from its checkpoint, the cheapest first: objective.gradient_cache true, by which memory"
    " grows with the chunk and not with the batch; activation_checkpointing true; sharding 'sharded' on several GPUs."
    " With these it begins anew, by --force or in another folder: a smaller objective.chunk_tokens (or chunk_size) with"
    " objective.gradient_cache; training.bf16 true; an adapter (lora); shorter texts (the encoder's max_length), or"
    " smaller batches and more of them a step (training.batches_per_step)."
)
"""What saves memory in training: first what changes no weight, but by a GPU's rounding, or lets a checkpoint go on."""


@contextmanager
def naming_full_memory(where: str, advice: str) -> Iterator[None]:
    """Around what may fill a GPU's memory: a ``UserError`` that says what was asked for ``where``, and the advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sentences = " ".join(str(error).split()).removeprefix("CUDA out of memory. ").split(". ")
        asked = ". ".join(sentences[:2]).rstrip(".")  # what was asked for and what is free
        raise UserError(f"The GPU's memory is full in {where}: {asked}. {advice}") from error
