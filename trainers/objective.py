"""The contract between the training loop and what it trains.

The loop calls ``collate`` on rows of a stored batch, ``forward`` on the result, and ``Outcome.backward``. Everything
else (encoders, losses, caches, look-ups) is the objective's own affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.jobs import load
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.list_scorer import ListScorer
from retrieval.encoders.pretrained import LocatedModels
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from retrieval.vectors import StoredVectors
from trainers.engine import collectives
from trainers.objectives.settings import ObjectiveSettings, Run

Batch = TypeVar("Batch")
Value = TypeVar("Value")
Part = TypeVar("Part")


@dataclass(frozen=True)
class Outcome:
    """The result of one forward pass: the mean loss over ``examples`` rows, and detached scalar tensors by name.

    Every pass of a run has the same metric names. The loop logs their mean over the pieces of a step. ``tokens``: the
    encoded ones, without padding. ``held``: vectors, and the leaf that the loss reads instead of them. ``backward``
    passes the leaf's gradient on afterwards.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    examples: int
    tokens: int = 0
    held: tuple[Tensor, Tensor] | None = None

    def backward(self, pieces: int, before_last: Callable[[], None] | None = None) -> None:
        """Adds the gradients of one of a step's ``pieces``; ``before_last`` is called when one pass is left to do."""
        root, gradient = self.loss / pieces, None
        if self.held is not None:
            torch.autograd.backward(root)
            root, gradient = self.held[0], self.held[1].grad
        if before_last is not None:
            before_last()
        torch.autograd.backward(root, gradient)


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of a stored batch's queries: documents a query, as means over the batch.

    ``positives``: None where no document is labelled so.
    ``in_batch``: other rows' documents and hard negatives. ``hard``: the query's own hard negatives. ``masked``: false
    negatives left out of both. ``documents``: all that the batch encodes. ``offered``: how many of them a query of
    another batch gains if negatives are shared over a step, None for all.
    """

    queries: int
    documents: int
    in_batch: float
    hard: float
    masked: float
    offered: int | None = None
    positives: float | None = None


class Objective(nn.Module, ABC, Generic[Batch]):
    """A loss with the modules it trains. Parameters that require gradients are trained, all others are left alone."""

    columns: tuple[str, ...]
    """The stored columns that it reads, and ``batch`` and ``epoch``, the numbers that the reader adds."""

    columns_from: ClassVar[str] = "Make batches for this objective, or choose another objective."
    """A sentence: what to do if a batch lacks one of them."""

    similarity: Literal["inner_product", "cosine"] = "inner_product"
    """The similarity of its training. A search of the exported encoder ranks by inner products of the encoder's
    vectors."""

    batch_group: dist.ProcessGroup | None = None
    """The ranks that share one loss, in row order. None where every rank has losses of its own."""

    may_hold: bool = False
    """Whether ``forward`` may set ``Outcome.held``. Gradients are then sent during the larger part of backward."""

    @classmethod
    def prepare(cls, settings: Any, towers: Towers, run: Run, models: LocatedModels) -> Towers:  # noqa: ARG003
        """The encoders as they are trained, before LoRA and the like; ``models``: by the run's dotted keys."""
        return towers

    @classmethod
    def build(cls, settings: Any, towers: Towers, models: LocatedModels, seed: int, /) -> "Objective[Any]":  # noqa: ARG003
        """The objective of ``settings`` around ``towers``, which are what they train; see ``build_objective``.

        By default around the one encoder.
        """
        return cls(towers.query, settings)

    @property
    def joins_step(self) -> bool:
        """Whether all batches of a step are one loss (negatives shared over the step) instead of one each.

        ``collate`` then gets the rows of several batches, and ``gather`` joins those of all ranks.
        """
        return False

    @property
    def slice_number(self) -> int:
        """Which slice of its batch this rank holds; 0 where it holds whole batches."""
        return 0 if self.batch_group is None else collectives.rank(self.batch_group)

    @abstractmethod
    def collate(self, rows: pa.Table) -> Batch:
        """Text to tensors, on the CPU, in two background threads at once; draws nothing at random.

        ``rows`` may be a slice of a stored batch. Only ``forward`` can use ``slice_number``, because during an
        evaluation it differs while training batches are collated. Returns any nest of dataclasses, dicts, tuples and
        lists with tensors that ``to_device`` can move. Other values stay as they are.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> Outcome:
        """The loss of one batch. Random draws come from torch's default generators, which the loop seeds."""

    @abstractmethod
    def comparisons(self, rows: pa.Table) -> Comparisons:
        """The comparisons of the queries of one whole stored batch, for the run's ledger."""

    @abstractmethod
    def encoder(self, role: Role) -> TextEncoder:
        """The encoder of a query or a document in validation, and in use."""

    @property
    def document_vectors(self) -> StoredVectors | None:
        """Vectors of the documents where these are fixed: searched in validation and in use, whatever is trained."""
        return None

    @property
    def list_scorer(self) -> ListScorer | None:
        """The module that ranks a query's candidates, in validation and in use, if inner products don't."""
        return None

    def check_batches(self, batches: BatchReader) -> None:
        """Raises ``UserError`` where what the objective looks up doesn't belong to these stored batches."""

    @property
    def corpus_sample(self) -> int:
        """Number of documents of another corpus that ``read_corpus`` wants; 0: none."""
        return 0

    def read_corpus(self, documents: Sequence[str]) -> None:  # noqa: ARG002
        """Lets the encoder read some documents of another corpus before it embeds its documents and queries."""
        return

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes the encoder(s) for inference, LoRA merged."""

    def gather(self, tensor: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """The rows of all slices of this rank's batch, ``counts`` of each (None: as many as here), differentiably."""
        if self.batch_group is None:
            return tensor  # a whole batch
        counts = counts or [len(tensor)] * collectives.world_size(self.batch_group)
        return collectives.gather(tensor, self.batch_group, counts)

    def counts_of_slices(self, count: int) -> list[int]:
        """Gathers each slice's ``count``, and blocks until all of its ranks answer. A whole batch has only its own."""
        if self.batch_group is None:
            return [count]
        device = next(self.parameters()).device
        return [of_slice for (of_slice,) in collectives.exchange([count], device, self.batch_group)]


def objective_class(settings: ObjectiveSettings) -> type[Objective[Any]]:
    """The class that is built from ``settings``."""
    return cast(type[Objective[Any]], load(settings.implementation))


def build_objective(
    settings: ObjectiveSettings, towers: Towers, models: LocatedModels | None = None, seed: int = 0
) -> Objective[Any]:
    """The objective of these settings around its encoders.

    ``models``: other models of a run, by the dotted keys of its settings. ``seed``: of new weights. Raises
    ``UserError`` where ``towers`` are not what the objective trains, and where it would read longer texts than they do.
    """
    kind = type(settings).model_fields["kind"].default
    if isinstance(towers.query, ContextualEncoder) and settings.trains != "contextual":
        raise UserError(
            f"The objective {kind} doesn't train contextual encoders, which read documents of the corpus before a"
            " text. The kind contextual does."
        )
    readers = {"max_length": towers.query, "query_max_length": towers.query, "document_max_length": towers.document}
    for key, encoder in readers.items():
        encoder.require_length(getattr(settings, key, None), f"objective.{key}")
    unfit = None
    if settings.trains == "one_encoder" and towers.query is not towers.document:
        unfit = "an encoder of documents of its own"
    if settings.trains == "two_encoders" and towers.document.form.kind != "single":
        unfit = "several vectors a document (encoder.form)"
    if unfit is not None:
        raise UserError(f"The objective {kind} doesn't train {unfit}. The kind multi_layer does.")
    return objective_class(settings).build(settings, towers, models or {}, seed)


def pinned(value: Value, device: torch.device) -> Value:
    """``value`` with its tensors in page-locked memory where ``device`` is a GPU: for background threads."""
    return value if device.type == "cpu" else cast(Value, map_nest(value, Tensor, Tensor.pin_memory))


def to_device(value: Value, device: torch.device) -> Value:
    """``value`` (any nest of dataclasses, mappings, tuples and lists) on ``device``; no wait for what is ``pinned``."""
    return cast(Value, map_nest(value, Tensor, lambda tensor: tensor.to(device, non_blocking=True)))


def map_nest(value: Any, kind: type[Part], change: Callable[[Part], Any]) -> Any:
    """``value``, a nest of dataclasses, mappings, tuples and lists, with every outermost ``kind`` in it changed."""
    if isinstance(value, kind):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_nest(getattr(value, f.name), kind, change) for f in fields(value)})
    if isinstance(value, Mapping):
        return {key: map_nest(item, kind, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_nest(item, kind, change) for item in value)
    return value
