"""The contrastive objective: stored batches with hard negatives, false negatives left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.encoders.specification import Role
from raytriever.retrieval.errors import UserError
from raytriever.trainers import collectives
from raytriever.trainers.gradient_cache import Chunks, cut_by_length, encode_chunks
from raytriever.trainers.objective import Objective, Outcome

_METRIC_ROWS = 1024  # rows of similarities that are looked at together


class ContrastiveSettings(Settings):
    """The masked contrastive loss.

    ``chunk_size``: texts of about one length that are encoded together, None: the whole batch at once.
    ``gradient_cache``: encode each chunk again in the backward pass instead of keeping its activations, so that
    memory grows with the chunk, not with the batch, for a third more computation. ``share_negatives``: whose
    documents a query is compared with, those of its batch or those of the whole step.
    """

    kind: Literal["contrastive"] = "contrastive"
    similarity: Literal["cosine", "inner_product"] = "cosine"
    similarity_temperature: float = Field(default=0.05, gt=0)
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


def masked_contrastive_loss(
    query_vectors: Tensor,
    document_vectors: Tensor,
    mask: Tensor,
    positives: Tensor,
    similarity_temperature: float,
) -> Tensor:
    """InfoNCE with false negatives left out: eq. 4 of Morris & Rush 2024, "Contextual Document Embeddings".

    mean_i [ log sum_{j not left out} exp(s_ij) - s_{i, positive of i} ] with s = query_vectors
    document_vectors^T / similarity_temperature, from queries to documents only. (The paper's sum runs over
    the set of equivalents; meant are the documents outside it.)

    ``query_vectors`` (B, d) and ``document_vectors`` (M, d), normalised or not as the similarity asks;
    ``mask`` bool (B, M), True is left out, never a query's own positive; ``positives`` int64 (B,), each
    query's column. Returns a scalar, computed in float32 (float64 for float64 vectors) whatever autocast
    says.
    """
    with torch.autocast(query_vectors.device.type, enabled=False):
        scores = _at_least_float32(query_vectors) @ _at_least_float32(document_vectors).T / similarity_temperature
        return torch.nn.functional.cross_entropy(scores.masked_fill(mask, -torch.inf), positives)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def contrastive_metrics(
    query_vectors: Tensor, document_vectors: Tensor, mask: Tensor, positives: Tensor
) -> dict[str, Tensor]:
    """How well a batch is told apart already, as scalars; arguments as for ``masked_contrastive_loss``.

    ``positive_rank``: mean place of the positive among the documents that are not left out, from 1, behind
    equals; ``accuracy``: share of queries whose positive is first; mean similarity of the positives and of
    the other documents.
    """
    count = len(query_vectors)
    ranks, positive_similarity, negative_similarity = [], [], []
    for rows in torch.split(torch.arange(count, device=query_vectors.device), _METRIC_ROWS):
        with torch.autocast(query_vectors.device.type, enabled=False):
            similarities = _at_least_float32(query_vectors[rows]) @ _at_least_float32(document_vectors).T
        own = similarities.gather(1, positives[rows, None])
        others = ~mask[rows]
        others.scatter_(1, positives[rows, None], False)
        ranks.append(1 + ((similarities >= own) & others).sum(dim=1))
        positive_similarity.append(own.squeeze(1))
        negative_similarity.append((similarities * others).sum(dim=1) / others.sum(dim=1).clamp(min=1))
    rank = torch.cat(ranks)
    return {
        "accuracy": (rank == 1).float().mean(),
        "positive_rank": rank.float().mean(),
        "positive_similarity": torch.cat(positive_similarity).mean(),
        "negative_similarity": torch.cat(negative_similarity).mean(),
    }


class Encoder(Protocol):
    """What the objective needs of an encoder (a ``torch.nn.Module``)."""

    @property
    def dimension(self) -> int: ...
    def tokenize(self, texts: Sequence[str], role: Role, max_length: int | None = None) -> dict[str, Tensor]: ...
    def __call__(self, features: Mapping[str, Tensor]) -> Tensor: ...
    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class ContrastiveBatch:
    """Tokenised texts (n queries; n positives, then all hard negatives) and the pairs that are left out.

    ``masked_rows``, ``masked_columns``: int64 (k,); row r leaves out column c, counted over the documents of
    the whole stored batch, then all its hard negatives.
    """

    queries: Chunks
    documents: Chunks
    masked_rows: Tensor
    masked_columns: Tensor
    largest_masked: int


class Contrastive(Objective[ContrastiveBatch]):
    """Trains one encoder for queries and documents with ``masked_contrastive_loss``.

    Rows of a batch: ``query``, ``document`` (its positive), ``hard_negatives`` and ``masked``, the columns
    left out for it, counted as in ``ContrastiveBatch``. Texts that occur several times in a batch are encoded
    once, so with dropout their copies share one draw. A batch may be cut over ranks.
    """

    columns: ClassVar[tuple[str, ...]] = ("query", "document", "hard_negatives", "masked")
    accepts_slices: ClassVar[bool] = True

    def __init__(self, encoder: Encoder, settings: ContrastiveSettings) -> None:
        super().__init__()
        if settings.share_negatives == "step":
            raise UserError(
                "share_negatives 'step' compares a query with the documents of other batches, but the stored"
                " masks say only which documents of its own batch are false negatives; those of other batches"
                " would be trained as negatives. Use 'batch', and pack larger batches where more negatives"
                " are wanted."
            )
        self.encoder = encoder
        self.settings = settings

    def collate(self, rows: pa.Table) -> ContrastiveBatch:
        """Tokenises each distinct text once. Raises ``UserError`` where a row leaves out its own positive."""
        settings = self.settings
        hard_negatives = pc.list_flatten(rows["hard_negatives"]).to_pylist()
        counts = pc.list_value_length(rows["masked"]).to_numpy().astype(np.int64)
        masked_rows = np.repeat(np.arange(len(rows)), counts)
        masked_columns = pc.list_flatten(rows["masked"]).to_numpy().astype(np.int64)
        self._check_mask(masked_rows, masked_columns, len(rows))
        return ContrastiveBatch(
            queries=self._tokenize(rows["query"].to_pylist(), "query", settings.query_max_length),
            documents=self._tokenize(
                rows["document"].to_pylist() + hard_negatives, "document", settings.document_max_length
            ),
            masked_rows=torch.from_numpy(masked_rows),
            masked_columns=torch.from_numpy(masked_columns),
            largest_masked=int(masked_columns.max(initial=-1)),
        )

    def _check_mask(self, rows: NDArray[np.int64], columns: NDArray[np.int64], count: int) -> None:
        wrong = np.flatnonzero((columns < 0) | (columns == rows + self.slice_number * count))
        if len(wrong):
            row, column = rows[wrong[0]], columns[wrong[0]]
            raise UserError(
                f"Row {row} leaves out column {column}, which is"
                f" {'its own positive' if column >= 0 else 'no column'}. A row may leave out documents and"
                " hard negatives other than its positive; make the batches again."
            )

    def _tokenize(self, texts: list[str], role: Role, max_length: int | None) -> Chunks:
        first: dict[str, int] = {}
        rows = torch.tensor([first.setdefault(text, len(first)) for text in texts])
        return cut_by_length(self.encoder.tokenize(list(first), role, max_length), self.settings.chunk_size, rows)

    def forward(self, batch: ContrastiveBatch) -> Outcome:
        """The loss over this slice's queries and the documents of the whole batch."""
        query_vectors = self._encode(batch.queries)
        count = len(query_vectors)
        document_vectors, total = self._gather_columns(self._encode(batch.documents), count)
        if batch.largest_masked >= len(document_vectors):
            raise UserError(
                f"A row leaves out column {batch.largest_masked}, but its batch has only"
                f" {len(document_vectors)} columns ({total} documents and {len(document_vectors) - total}"
                " hard negatives). Make the batches again."
            )
        mask = torch.zeros(count, len(document_vectors), dtype=torch.bool, device=query_vectors.device)
        mask[batch.masked_rows, batch.masked_columns] = True
        positives = torch.arange(count, device=query_vectors.device) + self.slice_number * count
        loss = masked_contrastive_loss(
            query_vectors, document_vectors, mask, positives, self.settings.similarity_temperature
        )
        metrics = contrastive_metrics(query_vectors, document_vectors, mask, positives)
        return Outcome(loss, metrics, count)

    def _encode(self, texts: Chunks) -> Tensor:
        vectors = encode_chunks(self.encoder, texts, cached=self.settings.gradient_cache)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.settings.similarity == "cosine" else vectors

    def _gather_columns(self, vectors: Tensor, positives: int) -> tuple[Tensor, int]:
        """All slices' positives, then all their hard negatives, and how many positives there are.

        One gather for both kinds: a slice may have no hard negatives, and its ranks must still meet in the
        backward pass.
        """
        if self.batch_group is None:
            return vectors, positives
        is_hard_negative = (torch.arange(len(vectors), device=vectors.device) >= positives).long()
        order = torch.argsort(self.gather(is_hard_negative), stable=True)
        return self.gather(vectors).index_select(0, order), positives * collectives.world_size(self.batch_group)

    def export(self, folder: Path) -> None:
        """Writes the encoder's own folder."""
        self.encoder.save(folder)
