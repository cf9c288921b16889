"""The contract between the training loop and what it trains.

The loop calls ``collate`` on rows of a stored batch, ``forward`` on the result, and ``Outcome.backward``. Everything
else (encoders, losses, caches, look-ups) is the objective's own affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast

import pyarrow as pa
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor, nn

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, without_inputs
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.list_scorer import ListScorer
from retrieval.encoders.pretrained import LocatedModel
from retrieval.encoders.specification import EncoderSettings, Role
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from retrieval.vectors import StoredVectors
from trainers.engine import collectives
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_CPU, CHUNK_TOKENS_ON_GPU, Chunks, cut_by_length
from trainers.engine.settings import TrainingSettings
from trainers.validation.settings import EvaluationSettings

Batch = TypeVar("Batch")
Value = TypeVar("Value")
Part = TypeVar("Part")


@dataclass(frozen=True)
class Outcome:
    """What one forward pass gives: the mean loss over ``examples`` rows, and detached scalar tensors by name.

    Every pass of a run has the same metric names; the loop logs their mean over the pieces of a step. ``tokens``:
    those that it encoded, without padding. ``held``: vectors, and the leaf that the loss reads in their place, whose
    gradient ``backward`` passes on afterwards.
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
    """What the queries of one stored batch are compared with: documents a query, as means over the batch.

    ``in_batch``: other rows' documents and hard negatives; ``hard``: the query's own hard negatives; ``masked``: of
    both, those left out as false negatives. ``documents``: all that the batch encodes; ``offered``: how many of them a
    query of another batch gains where negatives are shared over a step, None for all.
    """

    queries: int
    documents: int
    positives: float
    in_batch: float
    hard: float
    masked: float
    offered: int | None = None


class Run(Protocol):
    """What an objective may ask of the rest of a run's settings."""

    @property
    def encoder(self) -> EncoderSettings: ...
    @property
    def document_encoder(self) -> EncoderSettings | None: ...
    @property
    def dropout(self) -> float | None: ...
    @property
    def training(self) -> TrainingSettings: ...
    @property
    def validation(self) -> EvaluationSettings | None: ...


@dataclass(frozen=True)
class Paper:
    """Where an objective comes from."""

    authors: str
    title: str
    year: int
    url: str

    def cited(self) -> str:
        """As a line of Markdown."""
        return f"{self.authors} ({self.year}). [{self.title}]({self.url})."


class ObjectiveSettings(Settings):
    """The base of every objective's settings: what it asks of the rest of a run, and how it is built.

    Each has a field ``kind``, the literal by which a recipe chooses it.
    """

    paper: ClassVar[Paper]
    """Where the loss is from, for the model card."""

    trains: ClassVar[Literal["one_encoder", "two_encoders", "several_vectors", "contextual"]] = "one_encoder"
    """Which encoders: one for queries and documents; or one for each; or documents of several vectors too; or one of
    two stages."""

    needs_hard_negatives: ClassVar[bool] = False
    """Whether batches made without hard negatives are refused before they are made."""

    freezes_documents: ClassVar[bool] = False
    """Whether the queries alone are trained, so that the export still belongs to an encoder of the documents."""

    chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens that are encoded together, padding included, of texts of about one length; None: 2,048 on a CPU, 16,384 on
    a GPU."""
    chunk_size: int | None = Field(default=None, ge=1)
    """Instead of so many tokens, so many texts of about one length."""
    gradient_cache: bool = False
    """Encodes each chunk again in the backward pass: the memory of one chunk, for a third more computation."""

    @model_validator(mode="after")
    def _one_measure_of_chunks(self) -> Self:
        if self.chunk_tokens is not None and self.chunk_size is not None:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens} and chunk_size {self.chunk_size}, two measures of what is encoded"
                " together: leave one out"
            )
        return self

    def cut(self, features: Mapping[str, Tensor], encoder: nn.Module, rows: Tensor | None = None) -> Chunks:
        """``cut_by_length`` of texts that ``encoder`` will read, on whose processor the default depends."""
        tokens = self.chunk_tokens
        if tokens is None and self.chunk_size is None:
            on_cpu = next(encoder.parameters()).device.type == "cpu"
            tokens = CHUNK_TOKENS_ON_CPU if on_cpu else CHUNK_TOKENS_ON_GPU
        return cut_by_length(features, self.chunk_size, rows, tokens)

    @abstractmethod
    def build(self, towers: Towers, models: Mapping[str, LocatedModel], seed: int) -> "Objective[Any]":
        """The objective around ``towers``, which are what ``trains`` says; see ``build_objective``."""

    def check_run(self, run: Run) -> None:  # noqa: ARG002
        """Raises ``UserError`` where the rest of a run's settings doesn't fit the objective."""
        return

    def shaping(self) -> dict[str, Any]:
        """What the weights depend on, as JSON values, without inputs.

        A gradient cache repeats a chunk's computation, dropout included, bit for bit but where a GPU's kernels add up
        in any order: whatever is set, its default is recorded, and a run may be resumed with another.
        """
        return without_inputs(self) | {"gradient_cache": False}

    def prepare(self, towers: Towers, run: Run, models: Mapping[str, LocatedModel]) -> Towers:  # noqa: ARG002
        """The encoders as the objective trains them, before LoRA and the like; ``models``: by the run's dotted keys."""
        return towers


class Objective(nn.Module, ABC, Generic[Batch]):
    """A loss with the modules it trains. Parameters that require gradients are trained, all others are left alone."""

    columns: tuple[str, ...]
    """The stored columns that it reads, and ``batch`` and ``epoch``, the numbers that the reader adds."""

    columns_from: ClassVar[str] = "Make batches for this objective, or choose another objective."
    """What to do where a batch lacks one of them, as a sentence."""

    accepts_slices: ClassVar[bool] = False
    """Whether ``forward`` joins a batch that is cut over several ranks by calling ``gather``."""

    similarity: Literal["inner_product", "cosine"] = "inner_product"
    """By which it trains; a search of the exported encoder ranks by inner products of what the encoder returns."""

    batch_group: dist.ProcessGroup | None = None
    """The ranks whose rows are one loss, in row order; None where every rank has losses of its own."""

    may_hold: bool = False
    """Whether ``forward`` may set ``Outcome.held``: gradients are then sent behind the larger part of backward."""

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

        ``rows`` may be a slice of a stored batch; which one, ``slice_number`` says in ``forward`` alone: it is another
        during an evaluation, while batches to train on are collated. Returns any nest of dataclasses, dicts, tuples and
        lists whose tensors ``to_device`` can move; other values stay as they are.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> Outcome:
        """The loss of one batch. Random draws come from torch's default generators, which the loop seeds."""

    @abstractmethod
    def comparisons(self, rows: pa.Table) -> Comparisons:
        """What the queries of one whole stored batch are compared with, for the run's ledger."""

    @abstractmethod
    def encoder(self, role: Role) -> TextEncoder:
        """What embeds a query or a document when the objective is validated, and in use."""

    @property
    def document_vectors(self) -> StoredVectors | None:
        """Vectors of the documents where these are fixed: searched in validation and in use, whatever is trained."""
        return None

    @property
    def list_scorer(self) -> ListScorer | None:
        """What ranks a query's candidates, in validation and in use, where inner products don't."""
        return None

    def check_batches(self, batches: BatchReader) -> None:
        """Raises ``UserError`` where what the objective looks up doesn't belong to these stored batches."""

    @property
    def corpus_sample(self) -> int:
        """How many documents of another corpus ``read_corpus`` wants; 0: none."""
        return 0

    def read_corpus(self, documents: Sequence[str]) -> None:  # noqa: ARG002
        """What embeds documents of another corpus, and queries for it, may read some of it first."""
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
        """Each slice's ``count``, for which the ranks wait for one another; of a whole batch its own."""
        if self.batch_group is None:
            return [count]
        device = next(self.parameters()).device
        return [of_slice for (of_slice,) in collectives.exchange([count], device, self.batch_group)]


def build_objective(
    settings: ObjectiveSettings, towers: Towers, models: Mapping[str, LocatedModel] | None = None, seed: int = 0
) -> Objective[Any]:
    """The objective of these settings around its encoders.

    ``models``: what else a run names, by the dotted keys of its settings; ``seed``: of fresh weights. Raises
    ``UserError`` where ``towers`` are not what the objective trains, and where it would read longer texts than they do.
    """
    kind = type(settings).model_fields["kind"].default
    if isinstance(towers.query, ContextualEncoder) and settings.trains != "contextual":
        raise UserError(
            f"The objective {kind} doesn't train contextual encoders, which read some of the corpus before a text. The"
            " kind contextual does."
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
    return settings.build(towers, models or {}, seed)


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
