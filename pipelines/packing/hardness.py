"""How hard batches are for each other's queries: Contextual Document Embeddings (Morris & Rush 2024), eq. 2."""

import numpy as np
from numpy.typing import NDArray


def batch_hardness(
    *, queries: NDArray[np.floating], documents: NDArray[np.floating], mask: NDArray[np.bool_] | None = None
) -> float:
    """Mean of q_i · d_j over i != j of one batch (B, d), without the cells of ``mask`` (B, B); 0 where none is left.

    Without a mask it is (S_q · S_d - sum_i q_i · d_i) / (B (B - 1)) with S the sums: no B x B matrix.
    """
    size = len(queries)
    if size < 2:
        return 0.0
    if mask is None:
        queries, documents = queries.astype(np.float64), documents.astype(np.float64)
        own = float(np.einsum("nd,nd->", queries, documents))
        return (float(queries.sum(axis=0) @ documents.sum(axis=0)) - own) / (size * (size - 1))
    counted = ~mask & ~np.eye(size, dtype=bool)
    if not counted.any():
        return 0.0
    scores = queries @ documents.T
    return float(scores[counted].mean(dtype=np.float64))
