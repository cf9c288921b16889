"""The settings of a training loop, and which of them to change where a device lacks the precision or the memory."""

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import Level, PartialShare, PositiveShare, Settings, Share
from retrieval.encoders.specification import has_bfloat16

if TYPE_CHECKING:
    import torch


class OptimizerSettings(Settings):
    """The optimizer, its peak learning rate and the limit on the gradient.

    'adamw_8bit' keeps its two moments in a byte each (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
    Quantization"). It does so for weights of 4,096 numbers or more, and needs the extra ``optimizers``. Without decay
    it is Adam.
    """

    kind: Literal["adamw", "adam", "radam", "adamw_8bit"] = "adamw"
    """Kind of optimizer."""
    learning_rate: PositiveFloat = 2e-5
    """Learning rate at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; for adam an L2 penalty. Biases, normalisation layers and single numbers are exempt."""
    betas: tuple[PartialShare, PartialShare] = (0.9, 0.999)
    """Decay rates of the two running means."""
    epsilon: PositiveFloat = 1e-8
    """Epsilon, added to the denominator of an update."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients with a larger global norm are scaled down to it. null: no limit."""


_BELONGS_TO = {
    "decay": ("exponential",),
    "minimum": ("linear", "plateau"),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "threshold": ("plateau",),
}


class ScheduleSettings(Settings):
    """How the learning rate moves: up in a warm-up, then level, towards zero, by a factor a step, or on a plateau."""

    kind: Literal["constant", "linear", "exponential", "plateau"] = "linear"
    """What follows the warm-up. A plateau depends on the run's evaluations."""
    warmup_steps: NonNegativeInt = 0
    """Steps until the peak."""
    warmup_ratio: PartialShare | None = None
    """Steps until the peak as a share of the run's steps, rounded up."""
    decay: PositiveShare | None = None
    """For kind 'exponential': the factor at each step."""
    minimum: Share = 0.0
    """Lowest rate, as a share of the peak. 'linear' ends there, and 'plateau' stays above it."""
    factor: Level = 0.5
    """For kind 'plateau': the factor at each reduction."""
    patience: NonNegativeInt = 3
    """For kind 'plateau': evaluations in a row without improvement that are tolerated before a reduction."""
    threshold: NonNegativeFloat = 1e-4
    """For kind 'plateau': an improvement is larger than this share of the best."""

    def _check(self) -> None:
        if self.kind == "exponential" and self.decay is None:
            raise ValueError("kind 'exponential' needs decay, the factor at each step, such as 0.9999")
        for name, kinds in _BELONGS_TO.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to kind {' or '.join(map(repr, kinds))}, not to {self.kind!r}")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                "warmup_steps and warmup_ratio both set the length of the warm-up: give one of them, and set the"
                " other to 0 (warmup_steps) or null (warmup_ratio)"
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step depends on how many steps the run has."""
        return self.kind == "linear" or bool(self.warmup_ratio)

    def steps_of_warmup(self, total_steps: int) -> int:
        """Steps until the peak in a run of ``total_steps``."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * total_steps)


class TrainingSettings(Settings):
    """Length of the training, batches in a step, and the optimizer.

    A step's loss is the mean over its batches.
    """

    epochs: PositiveInt = 1
    """Epochs of the stored batches to train on. Each was packed by itself."""
    max_steps: PositiveInt | None = None
    """Most steps. Ends the run before its epochs do."""
    batches_per_step: PositiveInt = 1
    """Batches in a step, over all ranks."""
    group_by_length: bool = False
    """Whether a step has batches that take equally long, so that ranks wait less for one another."""
    hard_negatives: NonNegativeInt | None = None
    """Hard negatives to draw from each row's stored ones in every epoch. null: use all of them."""
    bf16: bool | Literal["auto"] = "auto"
    """Bfloat16 autocast. 'auto': where the processor has it."""
    exchange_bf16: bool = False
    """Whether ranks exchange and sum gradients in bfloat16. This halves the bytes, for many nodes. In a sum over more
    than about a hundred ranks, one after another, small values are lost."""
    tf32: bool = False
    """On a GPU: compute a step's float32 products, the losses' too, in TensorFloat-32 (10 bits of a factor). Searches
    and clusterings keep float32."""
    deterministic: bool = False
    """On a GPU: use kernels that sum in a fixed order, so that equal runs on equal machines give equal bits. Slower."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints. The last step makes one too."""
    seed: NonNegativeInt = 0
    """Seed of the order of batches and of all draws."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its peak learning rate."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The schedule of the learning rate."""

    @property
    def exchanged(self) -> "torch.dtype | None":
        """The data type of exchanged gradients. None: their own precision."""
        import torch

        return torch.bfloat16 if self.exchange_bf16 else None

    @property
    def precision(self) -> str:
        """The resolved precision in words."""
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


def require_precision(training: TrainingSettings, device: "torch.device") -> None:
    """Warns if a CPU computes slowly in the run's precision. A worker calls it before it trains.

    ``training.bf16`` is resolved: the driver chose it for all workers, perhaps without seeing their processors. Raises
    ``UserError`` if it is on and the GPU has no bfloat16 instructions, because it would emulate them.
    """
    if training.bf16 is not True or device.type not in ("cuda", "cpu") or has_bfloat16(gpu=device.type == "cuda"):
        return
    host = socket.gethostname()
    if device.type == "cuda":
        import torch

        raise UserError(
            "training.bf16 is on (by 'auto' where a GPU is asked for), but the"
            f" {torch.cuda.get_device_name(device)} of {host} has no bfloat16 instructions and would emulate them."
            " Set training.bf16 to false, or train on GPUs of compute capability 8.0 or higher (A100, L4, H100)."
        )
    log.info(
        f"  Warning: training.bf16 is on, but the CPU of {host} has no bfloat16 instructions and emulates them, which"
        " is slower than float32. Set training.bf16 to false."
    )


def require_sparse(settings: OptimizerSettings) -> None:
    """Raises ``UserError`` for what ``torch.optim.SparseAdam``, which trains static encoders, doesn't do."""
    if settings.kind not in ("adam", "adamw") or settings.weight_decay:
        raise UserError(
            f"training.optimizer is {settings.kind} with weight_decay {settings.weight_decay:g}, but a static"
            " encoder's step updates only the vectors of a batch's tokens, by Adam without decay. Set kind to adam"
            " or adamw, and weight_decay to 0."
        )


def require_package(settings: OptimizerSettings) -> Any:
    """The module of optimizers in 8 bits, None for others. Raises ``UserError`` where it isn't installed."""
    if settings.kind != "adamw_8bit":
        return None
    try:
        return import_module("bitsandbytes.optim")
    except ImportError as error:
        raise UserError(
            f"training.optimizer.kind is {settings.kind}, which needs the package bitsandbytes: pip install"
            " 'raytriever[optimizers]'. Or set it to adamw."
        ) from error


def require_room_for_warmup(settings: ScheduleSettings, total_steps: int) -> None:
    """Raises ``UserError`` where the run ends before its warm-up does."""
    warmup = settings.steps_of_warmup(total_steps)
    if warmup > total_steps:
        raise UserError(
            f"training.schedule.warmup_steps is {warmup}, but the run ends after step {total_steps}, before the"
            " learning rate reaches its peak. Lower it, or train longer (epochs, max_steps)."
        )


def require_evaluations(settings: ScheduleSettings, *, evaluated: bool) -> None:
    """Raises ``UserError`` where the rate goes by evaluations and the run makes none."""
    if settings.kind == "plateau" and not evaluated:
        raise UserError(
            "training.schedule.kind 'plateau' depends on evaluations, but the run has none: set validation too."
        )


IN_TRAINING = (
    "The run can resume from its checkpoint with these, the cheapest first: objective.gradient_cache true, so that"
    " memory grows with the chunk and not with the batch; activation_checkpointing true; sharding 'sharded' on"
    " several GPUs. It must start again (--force, or another folder) with these: a smaller objective.chunk_tokens"
    " (or chunk_size) with objective.gradient_cache; training.bf16 true; an adapter (lora); shorter texts (the"
    " encoder's max_length); smaller batches and more of them a step (training.batches_per_step)."
)
"""Remedies for full memory in training. First those that keep the weights, up to a GPU's rounding, or a checkpoint."""


@contextmanager
def naming_full_memory(where: str, advice: str) -> Iterator[None]:
    """Around what may fill a GPU's memory: a ``UserError`` that says what was asked for ``where``, and the advice."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        sentences = " ".join(str(error).split()).removeprefix("CUDA out of memory. ").split(". ")
        asked = ". ".join(sentences[:2]).rstrip(".")  # what was asked for and what is free
        raise UserError(f"The GPU's memory is full in {where}: {asked}. {advice}") from error
