"""The contrastive objective: stored batches with hard negatives, false negatives left out."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raytriever.retrieval.encoders.pooling import at_least_float32
from raytriever.trainers.gradient_cache import Chunks, encode_chunks
from raytriever.trainers.objective import Outcome
from raytriever.trainers.objectives.batch_metrics import batch_metrics
from raytriever.trainers.objectives.pair_batch import PairBatch
from raytriever.trainers.objectives.pair_objective import Encoder, PairObjective, PairSettings


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
