"""What the settings of every objective have, those of pairs and those of chunks.

No torch here: what is built of settings is imported when it is built (``ObjectiveSettings.implementation``).
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveInt

from raytriever.settings.configuration import Settings, without_inputs
from retrieval.encoders.specification import EncoderSettings
from trainers.engine.settings import TrainingSettings
from trainers.validation.settings import EvaluationSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainers.engine.gradient_cache import Chunks


class Run(Protocol):
    """The settings of a run that an objective may check."""

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
    """The source of an objective."""

    authors: str
    title: str
    year: int
    url: str

    def cited(self) -> str:
        """The citation as a line of Markdown."""
        return f"{self.authors} ({self.year}). [{self.title}]({self.url})."


class ObjectiveSettings(Settings):
    """The base of every objective's settings: what it asks of the rest of a run, and what is built.

    Each has a field ``kind``, the literal that a recipe names.
    """

    paper: ClassVar[Paper]
    """Source of the loss, for the model card."""

    trains: ClassVar[Literal["one_encoder", "two_encoders", "several_vectors", "contextual"]] = "one_encoder"
    """Encoders it can train: one for queries and documents, one for each, documents of several vectors too, or one of
    two stages."""

    implementation: ClassVar[str]
    """The ``Objective`` that is built from them, as ``module:class``. It is imported when it is built."""

    needs_hard_negatives: ClassVar[bool] = False
    """Whether batches without hard negatives are refused before they are made."""

    accepts_slices: ClassVar[bool] = False
    """Whether several workers may train on slices of one batch, whose vectors its loss gathers."""

    freezes_documents: ClassVar[bool] = False
    """Whether only the query encoder is trained, so that the export still belongs to an encoder of the documents."""

    chunk_tokens: PositiveInt | None = None
    """Tokens encoded together, padding included, of texts of similar length. null: 2,048 on a CPU, 16,384 on a GPU."""
    chunk_size: PositiveInt | None = None
    """Texts of similar length encoded together, instead of ``chunk_tokens``."""
    gradient_cache: bool = False
    """Whether to encode each chunk again in the backward pass. This needs the memory of one chunk, and a third more
    computation."""

    def _check(self) -> None:
        if self.chunk_tokens is not None and self.chunk_size is not None:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens} and chunk_size {self.chunk_size}, but both limit what is"
                " encoded together: leave one out"
            )

    def cut(self, features: "Mapping[str, Tensor]", encoder: "nn.Module", rows: "Tensor | None" = None) -> "Chunks":
        """``cut_by_length`` of texts for ``encoder``. The default depends on its processor."""
        from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_CPU, CHUNK_TOKENS_ON_GPU, cut_by_length

        tokens = self.chunk_tokens
        if tokens is None and self.chunk_size is None:
            on_cpu = next(encoder.parameters()).device.type == "cpu"
            tokens = CHUNK_TOKENS_ON_CPU if on_cpu else CHUNK_TOKENS_ON_GPU
        return cut_by_length(features, self.chunk_size, rows, tokens)

    def check_run(self, run: Run) -> None:  # noqa: ARG002
        """Raises ``UserError`` where the rest of a run's settings doesn't fit the objective."""
        return

    def shaping(self) -> dict[str, Any]:
        """What the weights depend on, as JSON values, without inputs.

        A gradient cache repeats a chunk's computation bit for bit, dropout included. Only a GPU's kernels may add up in
        another order. So the default is recorded whatever is set, and a run may be resumed with another.
        """
        return without_inputs(self) | {"gradient_cache": False}


class DomainPrompts(Settings):
    """Which of the encoder's prompts the texts of a domain have, by name; null: the role's own."""

    query: str | None = None
    """Prompt of the domain's queries."""
    document: str | None = None
    """Prompt of its documents, hard negatives and documents read as context."""


class PairSettings(ObjectiveSettings):
    """How a batch of pairs is encoded and joined."""

    accepts_slices: ClassVar = True

    query_max_length: PositiveInt | None = None
    """Tokens of a query. null: as the encoder says."""
    document_max_length: PositiveInt | None = None
    """Tokens of a document. null: as the encoder says."""
    share_negatives: Literal["batch", "step"] = "batch"
    """Documents to compare a query with: those of its batch, or those of the whole step."""
    prompts_by_domain: dict[str, DomainPrompts] = Field(default={}, exclude_if=operator.not_)
    """Prompts for the texts of some domains: names of ``encoder.prompts`` (CDE, section 10.7)."""
    matryoshka: tuple[int, ...] = Field(default=(), exclude_if=operator.not_)
    """Sizes of prefixes of the vectors, ascending. The loss of each prefix is added to the loss of whole vectors
    (Matryoshka Representation Learning, Kusupati et al. 2022, Eq. 1, weights 1)."""

    def _check(self) -> None:
        super()._check()
        if self.matryoshka and (self.matryoshka[0] < 1 or list(self.matryoshka) != sorted(set(self.matryoshka))):
            raise ValueError(f"matryoshka {list(self.matryoshka)} must be ascending and distinct, from 1")

    def prompt_names(self) -> dict[str, str]:
        """The names of prompts that it asks for, by the dotted keys of the settings that do."""
        return {
            f"objective.prompts_by_domain.{domain}.{role}": name
            for domain, own in self.prompts_by_domain.items()
            for role, name in own.model_dump(exclude_none=True).items()
        }


class ChunkSettings(ObjectiveSettings):
    """How the chunks of a batch are encoded."""

    similarity: Literal["asymmetric", "symmetric"] = "asymmetric"
    """Compares queries with passages, or passages with passages."""
    first_half: bool | list[str] = False
    """Whether queries are the first halves of chunks: all, none, or those of these domains (prose, not code: section
    4.1)."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of a chunk for the retriever. null: as the encoder says."""

    def _check(self) -> None:
        super()._check()
        if self.similarity == "symmetric" and self.first_half:
            raise ValueError("first_half shortens queries, but a symmetric similarity has none: leave out one of both")
