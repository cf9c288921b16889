"""Losses over ragged lists of labelled candidates: pure functions of scores, labels and a mask.

"CODER: An efficient framework for improving retrieval through COntextual Document Embedding Reranking" (Zerveas et al.
2022). Shapes: ``scores`` (B, N) of any float type, ``labels`` (B, N) with -inf where a candidate has none, ``present``
bool (B, N), False in padding. Each gives one number a query, (B,), in float32 at least; a query without a label gives 0
and no gradient. Nothing depends on how wide the padding is, but for the released divisor of ``max_margin_loss``.
"""

import torch
from torch import Tensor

from retrieval.encoders.pooling import at_least_float32

_PAIRS_AT_ONCE = 2**24  # 64 MiB in float32


def list_net_loss(scores: Tensor, labels: Tensor, present: Tensor) -> Tensor:
    """KL divergence of the softmax of the scores from that of the labels: eq. 3, the ListNet loss (Cao et al. 2007).

    sum_i t_i (log t_i - log p_i) with t = softmax(labels) and p = softmax(scores), both over the candidates that are
    there. Levels enter as they are, so equal labels share the target evenly and one label gives ``info_nce_loss``.
    """
    scores = at_least_float32(scores)
    log_target = masked_log_softmax(labels.to(scores.dtype), present & labels.isfinite())
    log_predicted = masked_log_softmax(scores, present)
    target = log_target.exp()
    in_target = target > 0
    terms = torch.where(in_target, target * (log_target - log_predicted), 0.0)
    return _of_labelled(terms.sum(dim=1), labels, present)


def info_nce_loss(scores: Tensor, labels: Tensor, present: Tensor) -> Tensor:
    """-log p of the highest label's candidate (the first of equals) with p = softmax(scores) over the list."""
    log_predicted = masked_log_softmax(at_least_float32(scores), present)
    best = labels.masked_fill(~present, -torch.inf).argmax(dim=1, keepdim=True)
    return _of_labelled(-log_predicted.gather(1, best).squeeze(1), labels, present)


def max_margin_loss(
    scores: Tensor, labels: Tensor, present: Tensor, relevant_at: float = 1.0, *, divide_by_width: bool = False
) -> Tensor:
    """Hinge over all pairs of a relevant and another candidate, the baseline of Fig. 2.

    sum_{p relevant, n not} max(0, 1 - s_p + s_n) / (number of candidates). Labels of ``relevant_at`` and more are
    relevant, all others are not. ``divide_by_width`` divides by the padded width N instead, as the released code does.
    Then a query's loss depends on the longest list beside it.
    """
    scores, width = at_least_float32(scores).masked_fill(~present, 0.0), scores.shape[1]
    relevant = present & (labels >= relevant_at)
    size = max(1, _PAIRS_AT_ONCE // width**2)
    blocks = zip(*(torch.split(tensor, size) for tensor in (scores, relevant, present & ~relevant)), strict=True)
    sums = torch.cat([_summed_hinges(*block) for block in blocks])
    return sums / (width if divide_by_width else present.sum(dim=1).clamp(min=1))


def _summed_hinges(scores: Tensor, relevant: Tensor, others: Tensor) -> Tensor:
    """sum_{p relevant, n other} max(0, 1 - s_p + s_n) of each row, (B,).

    Its gradient counts pairs, so that nothing with a number for each of them is kept for the backward pass.
    """
    with torch.no_grad():
        margins = 1 - scores[:, :, None] + scores[:, None, :]
        counted = (margins >= 0) & relevant[:, :, None] & others[:, None, :]
        sums = torch.where(counted, margins, 0.0).sum(dim=(1, 2))
        slopes = counted.sum(dim=1) - counted.sum(dim=2)
    return sums + (slopes * (scores - scores.detach())).sum(dim=1)


def mean_over_labelled(losses: Tensor, labels: Tensor, present: Tensor) -> Tensor:
    """The mean of ``losses`` (B,) over the queries that have a label; 0 where none has."""
    labelled = is_labelled(labels, present)
    return torch.where(labelled, losses, 0.0).sum() / labelled.sum().clamp(min=1)


def is_labelled(labels: Tensor, present: Tensor) -> Tensor:
    """Which queries have a label, bool (B,)."""
    return (present & labels.isfinite()).any(dim=1)


def masked_log_softmax(values: Tensor, kept: Tensor) -> Tensor:
    """log softmax over the ``kept`` of each row; -inf elsewhere, and in rows that keep nothing (without gradient)."""
    left_out = ~kept
    logits = values.masked_fill(left_out, -torch.inf)
    return logits.log_softmax(dim=1).masked_fill(left_out, -torch.inf)  # NaN in rows of -inf alone


def _of_labelled(losses: Tensor, labels: Tensor, present: Tensor) -> Tensor:
    return torch.where(is_labelled(labels, present), losses, 0.0)


@torch.no_grad()
def list_metrics(scores: Tensor, labels: Tensor, present: Tensor) -> dict[str, Tensor]:
    """How the lists are ranked, over the queries that have a label: scalars.

    ``positive_rank``: place of the best ranked labelled candidate, from 1, behind unlabelled ones that equal it.
    ``reciprocal_rank``: mean of its inverse. ``unlabelled``: share of queries without a label, which are left out.
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
