"""How well a batch is told apart already."""

from collections.abc import Callable

import torch
from torch import Tensor

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
