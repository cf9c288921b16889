"""How similar the documents of a batch are to each other: the weights of in-batch attention, and what they look like.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", section 3.3.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from raytriever.retrieval.encoders.pooling import at_least_float32
from raytriever.retrieval.errors import UserError

Precision = Literal["float32", "bfloat16"]

_LIVE = 1e-3  # of p (1 - p), the derivative of a softmax weight by its own logit


def in_batch_similarity(
    query_vectors: Tensor, passage_vectors: Tensor, temperature: float | Tensor, precision: Precision = "float32"
) -> Tensor:
    """Sim, (B, B): row i says how much of each other document j the prediction of document i reads.

    Softmax over j of cos(query i, passage j) / ``temperature`` without j = i, which is exactly 0; other weights sum to
    1. ``query_vectors`` and ``passage_vectors``: (B, d), of any norm; one tensor for both is the paper's formula.

    ``precision``: of cosines and softmax. 'float32' (float64 for float64 vectors) whatever autocast says; 'bfloat16' is
    what the authors trained with: its cosines are up to 0.004 apart, which at a temperature of 1e-4 leaves a row either
    one-hot or tied. The result is float32 (float64) in both. Raises ``UserError`` for a batch of one document.
    """
    if len(query_vectors) < 2:
        raise UserError(
            f"In-batch attention needs at least two documents a batch, and here is {len(query_vectors)}. Make larger"
            " batches (16 is usual; with two, the retriever gets no gradient)."
        )
    with torch.autocast(query_vectors.device.type, enabled=False):
        queries, passages = at_least_float32(query_vectors), at_least_float32(passage_vectors)
        exact = queries.dtype
        if precision == "bfloat16":
            queries, passages = queries.bfloat16(), passages.bfloat16()
        cosines = functional.normalize(queries, dim=-1) @ functional.normalize(passages, dim=-1).T
        itself = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
        return (cosines / temperature).masked_fill(itself, -torch.inf).softmax(dim=-1).to(exact)


@torch.no_grad()
def row_entropy(similarity: Tensor) -> Tensor:
    """Mean entropy of the rows of Sim (B, B) in nats: 0 where all are one-hot, at most log(B - 1)."""
    terms: Tensor = torch.special.entr(at_least_float32(similarity))
    return terms.sum(dim=-1).mean()


@torch.no_grad()
def live_row_share(similarity: Tensor) -> Tensor:
    """Share of the rows of Sim (B, B) that pass a gradient on to the retriever: some weight p with p (1 - p) > 1e-3."""
    weights = at_least_float32(similarity)
    return (weights * (1 - weights)).amax(dim=-1).gt(_LIVE).to(weights.dtype).mean()
