"""Encoding many texts fast: length-sorted batches under a token budget, identical texts once."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.retrieval.encoders.specification import Role
from raytriever.retrieval.encoders.text_encoder import TextEncoder


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[NDArray[np.int64]]:
    """Cuts texts, longest first, into batches of at most ``budget`` padded tokens (at least one text each).

    ``lengths``: tokens of each text. Returns index arrays; the order is a function of the lengths alone.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


@torch.inference_mode()
def encode_texts(
    encoder: TextEncoder,
    texts: Sequence[str],
    role: Role,
    *,
    token_budget: int = 8192,
    on_batch: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Vectors (n, dimension) float32 of ``texts`` in their order; equal texts are encoded once.

    ``on_batch`` is told the number of distinct texts of each finished batch.
    """
    first: dict[str, int] = {}
    place = np.array([first.setdefault(text, len(first)) for text in texts], dtype=np.int64)
    distinct = list(first)
    ids = encoder.tokenize_ids(distinct, role) if distinct else []
    vectors = np.empty((len(distinct), encoder.dimension), dtype=np.float32)
    device = next(encoder.parameters()).device
    for batch in token_budget_batches([len(row) for row in ids], token_budget):
        features = {name: tensor.to(device) for name, tensor in encoder.pad([ids[i] for i in batch]).items()}
        vectors[batch] = encoder(features).float().cpu().numpy()
        if on_batch:
            on_batch(len(batch))
    return vectors[place]
