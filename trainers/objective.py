"""The contract between the training loop and what it trains.

The loop calls ``collate`` on rows of a stored batch, ``forward`` on the result, and backpropagates
``Outcome.loss``. Everything else (encoders, losses, caches, look-ups) is the objective's own affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytriever.trainers import collectives

Batch = TypeVar("Batch")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Outcome:
    """What one forward pass says: the mean loss over ``examples`` rows, and detached scalar tensors by name.

    Every pass of a run has the same metric names; the loop logs their mean over the pieces of a step.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    examples: int


class Objective(nn.Module, ABC, Generic[Batch]):
    """A loss with the modules it trains.

    Parameters that require gradients are trained, all others are left alone.
    """

    columns: ClassVar[tuple[str, ...]]
    """The columns it reads from a stored batch."""

    accepts_slices: ClassVar[bool] = False
    """Whether ``forward`` joins a batch that is cut over several ranks by calling ``gather``."""

    batch_group: dist.ProcessGroup | None = None
    """The ranks that hold slices of one batch, in row order; None where every rank holds whole batches."""

    @property
    def slice_number(self) -> int:
        """Which slice of its batch this rank holds; 0 where it holds whole batches."""
        return 0 if self.batch_group is None else collectives.rank(self.batch_group)

    @abstractmethod
    def collate(self, rows: pa.Table) -> Batch:
        """Text to tensors, on the CPU, in a background thread; draws nothing at random.

        Returns any nest of dataclasses, dicts, tuples and lists with tensors in it, which ``to_device`` can
        move.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> Outcome:
        """The loss of one batch. Random draws come from torch's default generators, which the loop seeds."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes the encoder(s) for inference, LoRA merged."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all slices of this rank's batch, differentiably; identity for a whole batch."""
        return tensor if self.batch_group is None else collectives.gather(tensor, self.batch_group)


def to_device(value: Value, device: torch.device) -> Value:
    """``value`` (any nest of dataclasses, mappings, tuples and lists) with its tensors on ``device``."""
    return cast(Value, _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device) for item in value)
    return value
