"""The contrastive objective: stored batches with hard negatives, false negatives left out."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from retrieval.encoders.pooling import at_least_float32
from trainers.engine.gradient_cache import Chunks, encode_chunks
from trainers.objective import Outcome
from trainers.objectives.pair_batch import PairBatch
from trainers.objectives.pair_objective import Encoder, PairObjective, PairSettings

# How well a batch is told apart already.

_METRIC_ROWS = 1024  # rows of similarities that are looked at together


@torch.no_grad()
def batch_metrics(similarities_of: Callable[[Tensor], Tensor], mask: Tensor, positives: Tensor) -> dict[str, Tensor]:
    """Means over the n queries of a batch with M columns, as scalars.

    ``positive_rank``: place of the positive among the documents that are not left out, from 1, behind equals;
    ``accuracy``: share of queries whose positive is first; similarity of the positives and of the other documents.

    ``similarities_of`` takes rows, int64 (k,), and gives their similarities (k, M): not all are in memory at once.
    ``mask`` bool (n, M), True is left out; ``positives`` int64 (n,), each query's column.
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


class ContrastiveSettings(PairSettings):
    """The masked contrastive loss."""

    kind: Literal["contrastive"] = "contrastive"
    similarity: Literal["cosine", "inner_product"] = "cosine"
    similarity_temperature: float = Field(default=0.05, gt=0)


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
        scores = at_least_float32(query_vectors) @ at_least_float32(document_vectors).T / similarity_temperature
        return torch.nn.functional.cross_entropy(scores.masked_fill(mask, -torch.inf), positives)


def contrastive_metrics(
    query_vectors: Tensor, document_vectors: Tensor, mask: Tensor, positives: Tensor
) -> dict[str, Tensor]:
    """``batch_metrics`` of vectors, scalars without gradients; arguments as for ``masked_contrastive_loss``."""

    def similarities_of(rows: Tensor) -> Tensor:
        with torch.autocast(query_vectors.device.type, enabled=False):
            return at_least_float32(query_vectors[rows]) @ at_least_float32(document_vectors).T

    return batch_metrics(similarities_of, mask, positives)


class Contrastive(PairObjective):
    """Trains one encoder for queries and documents, or one for each, with ``masked_contrastive_loss``."""

    def __init__(
        self, encoder: Encoder, settings: ContrastiveSettings, document_encoder: Encoder | None = None
    ) -> None:
        super().__init__(encoder, document_encoder or encoder, settings)
        self.settings = settings
        self.similarity = settings.similarity

    def forward(self, batch: PairBatch) -> Outcome:
        """The loss over this rank's queries and the documents of all ranks that share it."""
        columns = self.count_columns(batch)
        query_vectors = self._encode(self.query_encoder, batch.queries)
        document_vectors = self.gather_columns(self._encode(self.document_encoder, batch.documents), columns)
        mask, positives = columns.mask, columns.positives
        temperature = self.settings.similarity_temperature
        loss = masked_contrastive_loss(query_vectors, document_vectors, mask, positives, temperature)
        metrics = contrastive_metrics(query_vectors, document_vectors, mask, positives)
        return Outcome(loss, metrics, len(query_vectors), batch.tokens)

    def _encode(self, encoder: Encoder, texts: Chunks) -> Tensor:
        vectors = encode_chunks(encoder, texts, cached=self.settings.gradient_cache)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.settings.similarity == "cosine" else vectors
