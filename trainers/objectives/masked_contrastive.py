"""The masked contrastive losses by themselves: other trainers take them without the libraries of ours."""

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


def distillation_loss(
    query_vectors: Tensor,
    document_vectors: Tensor,
    teacher_scores: Tensor,
    similarity_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Cross-entropy of the query's distribution over a batch's documents to a teacher's, mean over queries.

    - mean_i sum_j p_ij log softmax_j(s_ij) with p = softmax(teacher_scores / teacher_temperature) and s as in
    ``masked_contrastive_loss``. Its gradient is that of the KL divergence in Lin, Yang & Lin 2021, "In-Batch Negatives
    for Knowledge Distillation with Tightly-Coupled Teachers for Dense Retrieval". A query whose scores are all 0, which
    a zero vector has, learns nothing.

    ``query_vectors`` (n, d), ``document_vectors`` (B, d), ``teacher_scores`` (n, B). Returns a scalar, computed in
    float32 (float64 for float64 vectors).
    """
    with torch.autocast(query_vectors.device.type, enabled=False):
        scores = at_least_float32(query_vectors) @ at_least_float32(document_vectors).T / similarity_temperature
        told = teacher_scores.any(-1, keepdim=True)
        wanted = told * (teacher_scores.to(scores.dtype) / teacher_temperature).softmax(-1)
        return torch.nn.functional.cross_entropy(scores, wanted)


def all_directions_loss(
    query_vectors: Tensor,
    document_vectors: Tensor,
    mask: Tensor,
    positives: Tensor,
    similarity_temperature: float,
    all_queries: Tensor,
    all_masks: Tensor,
) -> Tensor:
    """``masked_contrastive_loss`` with more negatives: the improved contrastive loss of Li et al. 2023 (GTE).

    A pair (q_i, d_i) is told apart not only from (q_i, d_j), but also from (q_i, q_j), (q_j, d_i) and (d_i, d_j), in
    one softmax. The paper's sum has (q_i, d_i) twice, as q_i's and as d_i's, which holds the loss above log 2; here it
    stands once. The mask holds in each direction: where d_j is left out for q_i, q_i is no negative of d_j. Where
    either leaves out the other's document, neither their queries nor their documents are negatives of each other.

    ``all_queries`` (N, d): the queries of all rows. The first N of the M documents are their positives, in order.
    ``all_masks`` bool (N, N): what each of them leaves out of the first N documents. The rest is as in
    ``masked_contrastive_loss``.
    """
    with torch.autocast(query_vectors.device.type, enabled=False):
        queries, documents, others = map(at_least_float32, (query_vectors, document_vectors, all_queries))
        count = len(others)
        own = torch.nn.functional.one_hot(positives, count).bool()
        left_out_for_others = all_masks[:, positives].T
        alike = mask[:, :count] | left_out_for_others | own
        scores = [
            (queries @ documents.T).masked_fill(mask, -torch.inf),
            (queries @ others.T).masked_fill(alike, -torch.inf),
            (documents[positives] @ others.T).masked_fill(left_out_for_others | own, -torch.inf),
            (documents[positives] @ documents[:count].T).masked_fill(alike, -torch.inf),
        ]
        return torch.nn.functional.cross_entropy(torch.cat(scores, dim=1) / similarity_temperature, positives)
