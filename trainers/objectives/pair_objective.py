"""What objectives over queries, documents and hard negatives share: towers, collation, gathering, export."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, cast

import pyarrow as pa
from pydantic import Field, model_validator
from torch import Tensor

from retrieval.encoders.specification import Role
from retrieval.encoders.towers import write_towers
from trainers.objective import Comparisons, KindSettings, Objective
from trainers.objectives.pair_batch import Columns, PairBatch, collate_pairs, compare_pairs, count_columns

if TYPE_CHECKING:
    from retrieval.encoders.text_encoder import TextEncoder


class PairSettings(KindSettings):
    """How a batch of pairs is encoded and joined.

    ``chunk_size``: texts of about one length that are encoded together, None: the whole batch at once.
    ``gradient_cache``: encode each chunk again in the backward pass instead of keeping its activations, so that
    memory grows with the chunk, not with the batch, for a third more computation. ``share_negatives``: whose
    documents a query is compared with, those of its batch or those of the whole step.
    """

    query_max_length: int | None = Field(default=None, ge=1)  # tokens; None: as the encoder says
    document_max_length: int | None = Field(default=None, ge=1)
    chunk_size: int | None = Field(default=None, ge=1)
    gradient_cache: bool = False
    share_negatives: Literal["batch", "step"] = "batch"

    @model_validator(mode="after")
    def _gradient_cache_needs_chunks(self) -> Self:
        if self.gradient_cache and self.chunk_size is None:
            raise ValueError("gradient_cache saves memory only by chunks: set chunk_size (16 to 128 texts) too")
        return self


class Encoder(Protocol):
    """What such objectives need of an encoder (a ``torch.nn.Module``)."""

    @property
    def dimension(self) -> int: ...
    def tokenize(self, texts: Sequence[str], role: Role, max_length: int | None = None) -> dict[str, Tensor]: ...
    def __call__(self, features: Mapping[str, Tensor]) -> Tensor: ...
    def save(self, folder: Path) -> None: ...


class PairObjective(Objective[PairBatch]):
    """An objective over ``query``, ``document`` (its positive), ``hard_negatives`` and ``masked``.

    ``masked`` are the columns left out for a row: the documents of its stored batch, then all its hard negatives. A
    batch may be cut over ranks. With ``share_negatives`` 'step' all rows of a step are one loss, told apart by
    ``batch``; ``count_columns`` says what a row then leaves out of other batches. Texts that occur several times among
    a rank's rows are encoded once, so with dropout their copies share one draw.

    Queries and documents have an encoder each, or one and the same.
    """

    columns: ClassVar[tuple[str, ...]] = ("query", "document", "hard_negatives", "masked", "batch")
    accepts_slices: ClassVar[bool] = True

    def __init__(self, query_encoder: Encoder, document_encoder: Encoder, settings: PairSettings) -> None:
        super().__init__()
        self.query_encoder = query_encoder
        self.document_encoder = document_encoder
        self._pair_settings = settings

    @property
    def joins_step(self) -> bool:
        """Whether negatives are shared over the step."""
        return self._pair_settings.share_negatives == "step"

    def collate(self, rows: pa.Table, first_row: int = 0) -> PairBatch:
        """Tokenises each distinct text once. Raises ``UserError`` where a row leaves out its own positive."""
        settings = self._pair_settings
        return collate_pairs(
            rows,
            partial(self.query_encoder.tokenize, role="query", max_length=settings.query_max_length),
            partial(self.document_encoder.tokenize, role="document", max_length=settings.document_max_length),
            settings.chunk_size,
            joined=self.joins_step,
            first_row=first_row,
        )

    def count_columns(self, batch: PairBatch) -> Columns:
        """What this rank's queries are scored over."""
        return count_columns(batch, self.gather, self.slice_number)

    def gather_columns(self, documents: Tensor, columns: Columns) -> Tensor:
        """What all ranks hold of their documents (rows), by column.

        One gather for positives and hard negatives: a rank may have none of these, and all must meet in the backward
        pass.
        """
        return documents if self.batch_group is None else self.gather(documents).index_select(0, columns.order)

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """All documents and hard negatives of the batch, for each query."""
        return compare_pairs(rows)

    def encoder(self, role: Role) -> "TextEncoder":
        """The tower of that role."""
        return cast("TextEncoder", self.query_encoder if role == "query" else self.document_encoder)

    def export(self, folder: Path) -> None:
        """Writes the encoder's own folder, or one folder of both."""
        if self.query_encoder is self.document_encoder:
            self.query_encoder.save(folder)
        else:
            write_towers(self.encoder("query"), self.encoder("document"), folder)
