"""The masked contrastive loss by itself: other trainers take it without the libraries of ours."""

import torch
from torch import Tensor

from retrieval.encoders.pooling import at_least_float32


def masked_contrastive_loss(
    query_vectors: Tensor, document_vectors: Tensor, mask: Tensor, positives: Tensor, similarity_temperature: float
) -> Tensor:
    """InfoNCE with false negatives left out: eq. 4 of Morris & Rush 2024, "Contextual Document Embeddings".

    mean_i [ log sum_{j not left out} exp(s_ij) - s_{i, positive of i} ] with s = query_vectors document_vectors^T /
    similarity_temperature, from queries to documents only. (The paper's sum runs over the set of equivalents; meant are
    the documents outside it.)

    ``query_vectors`` (B, d) and ``document_vectors`` (M, d), normalised or not as the similarity asks. ``mask`` bool
    (B, M), True is left out, never a query's own positive. ``positives`` int64 (B,), each query's column. Returns a
    scalar, computed in float32 (float64 for float64 vectors) whatever autocast says.
    """
    with torch.autocast(query_vectors.device.type, enabled=False):
        scores = at_least_float32(query_vectors) @ at_least_float32(document_vectors).T / similarity_temperature
        return torch.nn.functional.cross_entropy(scores.masked_fill(mask, -torch.inf), positives)
