"""How hard batches are for each other's queries: Contextual Document Embeddings (Morris & Rush 2024), eq. 2."""

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.lloyd import cluster_sums
from pipelines.clustering.points import BLOCK_ROWS


def batch_hardness(
    query_vectors: NDArray[np.float32], document_vectors: NDArray[np.float32], mask: NDArray[np.bool_] | None = None
) -> float:
    """Mean of q_i · d_j over i != j of one batch (B, d), without the cells of ``mask`` (B, B); 0 where none is left.

    Without a mask it is (S_q · S_d - sum_i q_i · d_i) / (B (B - 1)) with S the sums: no B x B matrix.
    """
    size = len(query_vectors)
    if size < 2:
        return 0.0
    if mask is None:
        queries, documents = query_vectors.astype(np.float64), document_vectors.astype(np.float64)
        own = float(np.einsum("nd,nd->", queries, documents))
        return (float(queries.sum(axis=0) @ documents.sum(axis=0)) - own) / (size * (size - 1))
    counted = ~mask & ~np.eye(size, dtype=bool)
    if not counted.any():
        return 0.0
    scores = query_vectors @ document_vectors.T
    return float(scores[counted].mean(dtype=np.float64))


def pair_similarity(
    documents: NDArray[np.floating], queries: NDArray[np.floating], groups: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Eq. 2 of each group, float64 (groups,): the sum over i, j in it, i = j included, of d_i·q_j + d_j·q_i.

    ``documents``, ``queries`` (N, d), may be memory-mapped; ``groups`` (N,): the group of each pair, from 0. Computed
    as 2·S_D·S_Q with S the sums of a group's vectors: linear in N.
    """
    count = int(groups.max()) + 1
    document_sums = np.zeros((count, documents.shape[1]))
    query_sums = np.zeros_like(document_sums)
    for begin in range(0, len(groups), BLOCK_ROWS):
        part = slice(begin, begin + BLOCK_ROWS)
        document_sums += cluster_sums(documents[part], groups[part], count)
        query_sums += cluster_sums(queries[part], groups[part], count)
    sums: NDArray[np.float64] = 2 * np.einsum("ij,ij->i", document_sums, query_sums)
    return sums
