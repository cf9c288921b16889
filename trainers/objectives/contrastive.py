"""The contrastive objective: stored batches with hard negatives, false negatives left out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from trainers.objectives.masked_contrastive import all_directions_loss, distillation_loss, masked_contrastive_loss
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.objectives.pairs import Candidates, PairBatch, PairObjective

_METRIC_ROWS = 1024  # rows of similarities that are looked at together


@torch.no_grad()
def batch_metrics(similarities_of: Callable[[Tensor], Tensor], mask: Tensor, positives: Tensor) -> dict[str, Tensor]:
    """In-batch accuracy and the like: means over the n queries of a batch with M candidates, as scalars.

    ``positive_rank``: place of the positive among the documents that are not left out, from 1, behind equals.
    ``accuracy``: share of queries with the positive first. The similarity of the positives and of the other documents.

    ``similarities_of`` takes rows, int64 (k,), and gives their similarities (k, M), so not all are in memory at once.
    ``mask`` bool (n, M), True is left out. ``positives`` int64 (n,), each query's column.
    """
    ranks, positive_similarity, negative_similarity = [], [], []
    for rows in torch.split(torch.arange(len(positives), device=positives.device), _METRIC_ROWS):
        similarities = similarities_of(rows)
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


def contrastive_metrics(
    query_vectors: Tensor, document_vectors: Tensor, mask: Tensor, positives: Tensor
) -> dict[str, Tensor]:
    """``batch_metrics`` of vectors, scalars without gradients; arguments as for ``masked_contrastive_loss``."""

    def similarities_of(rows: Tensor) -> Tensor:
        with torch.autocast(query_vectors.device.type, enabled=False):
            return at_least_float32(query_vectors[rows]) @ at_least_float32(document_vectors).T

    return batch_metrics(similarities_of, mask, positives)


def contrast(
    queries: Tensor, documents: Tensor, candidates: Candidates, similarity_temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """``masked_contrastive_loss`` and ``contrastive_metrics`` of queries (n, d) over documents (M, d) by column."""
    loss = masked_contrastive_loss(queries, documents, candidates.mask, candidates.positives, similarity_temperature)
    return loss, contrastive_metrics(queries, documents, candidates.mask, candidates.positives)


@dataclass(frozen=True)
class ScoredPairs(PairBatch):
    """n rows of a stored batch of B, with the surrogate's scores of its documents, float32 (n, B)."""

    surrogate_scores: Tensor


class Contrastive(PairObjective[ContrastiveSettings]):
    """Trains one encoder for queries and documents, or one for each, with ``masked_contrastive_loss``.

    With ``distillation`` a part of the loss is ``distillation_loss``.
    """

    columns_from: ClassVar[str] = "Make batches of pairs; those for distillation with surrogate_scores: true."

    def __init__(
        self, encoder: TextEncoder, settings: ContrastiveSettings, document_encoder: TextEncoder | None = None
    ) -> None:
        super().__init__(encoder, settings, document_encoder)
        self.similarity = settings.similarity
        if settings.distillation:
            self.columns = (*self.columns, "surrogate_scores")

    @classmethod
    def build(cls, settings: ContrastiveSettings, towers: Towers, *_: Any) -> Self:
        """One encoder, or one for each role."""
        return cls(towers.query, settings, towers.document)

    def collate(self, rows: pa.Table) -> PairBatch:
        """Tokenises each distinct text once."""
        batch = super().collate(rows)
        if not self.settings.distillation:
            return batch
        scores = pc.list_flatten(rows["surrogate_scores"]).to_numpy().astype(np.float32)
        return ScoredPairs(**vars(batch), surrogate_scores=torch.from_numpy(scores).view(len(rows), -1))

    def loss(self, queries: Tensor, documents: Tensor, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of cosines or inner products."""
        if self.settings.similarity == "cosine":
            queries, documents = (torch.nn.functional.normalize(vectors, dim=-1) for vectors in (queries, documents))
        loss, metrics = self._contrast(queries, documents, candidates)
        if share := self.settings.distillation:
            scores = cast(ScoredPairs, candidates.batch).surrogate_scores
            temperatures = self.settings.similarity_temperature, self.settings.teacher_temperature
            distilled = distillation_loss(queries, documents[: scores.shape[1]], scores, *temperatures)
            loss = (1 - share) * loss + share * distilled
        return loss, metrics

    def _contrast(self, queries: Tensor, documents: Tensor, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        temperature = self.settings.similarity_temperature
        if self.settings.directions == "query_to_document":
            return contrast(queries, documents, candidates, temperature)
        compared = queries, documents, candidates.mask, candidates.positives
        all_queries = self.gather(queries)
        all_masks = self.gather(candidates.mask[:, : len(all_queries)].float()).bool()
        return all_directions_loss(*compared, temperature, all_queries, all_masks), contrastive_metrics(*compared)
