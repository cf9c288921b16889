"""What is measured of ranked lists in training."""

import torch
from torch import Tensor

from raytriever.trainers.objectives.coder.losses import is_labelled, mean_over_labelled


@torch.no_grad()
def list_metrics(scores: Tensor, labels: Tensor, present: Tensor) -> dict[str, Tensor]:
    """How the lists are ranked, over the queries that have a label: scalars.

    ``positive_rank``: place of the best ranked labelled candidate, from 1, behind unlabelled ones that equal it;
    ``reciprocal_rank``: mean of its inverse. ``unlabelled``: share of queries without a label, which are left out;
    ``list_length``: candidates a query. Shapes as in ``losses``.
    """
    labelled = present & labels.isfinite()
    best = scores.masked_fill(~labelled, -torch.inf).amax(dim=1, keepdim=True)
    ranks = 1.0 + ((scores >= best) & present & ~labelled).sum(dim=1)
    return {
        "reciprocal_rank": mean_over_labelled(1 / ranks, labels, present),
        "positive_rank": mean_over_labelled(ranks, labels, present),
        "unlabelled": 1 - is_labelled(labels, present).float().mean(),
        "list_length": present.sum(dim=1).float().mean(),
    }
