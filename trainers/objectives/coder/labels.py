"""Relevance labels of candidate lists before they become a target: levels, and normalisations of the released code.

``labels`` (B, N): graded relevance, -inf where a candidate is not labelled or is padding; stays -inf in all of them.
"""

from typing import Literal

import torch
from torch import Tensor

Normalization = Literal["none", "max", "max_min", "max_min_max", "max_min_batch_mean", "standard_deviation"]


def at_level(labels: Tensor, level: float) -> Tensor:
    """Labels below ``level`` count as none: 1 is lenient, 2 strict on the scale of TREC."""
    return labels.masked_fill(labels < level, -torch.inf)


def binary(labels: Tensor) -> Tensor:
    """Every label is 1: an even target over the labelled."""
    return torch.where(labels.isfinite(), torch.ones_like(labels), labels)


def normalized(labels: Tensor, kind: Normalization) -> Tensor:
    """Labels of each query put on one scale, by its finite labels v.

    max: v / max. max_min: (v - min) / (max - min). max_min_max: that times max. max_min_batch_mean: max_min times the
    mean of all of the batch's. standard_deviation: (v - min) / population standard deviation. A query whose labels are
    all equal has no spread to divide by: its labels become 1 (times what the kind multiplies by).
    """
    if kind == "none":
        return labels
    finite = labels.isfinite()
    largest = labels.amax(dim=1, keepdim=True)
    smallest = labels.masked_fill(~finite, torch.inf).amin(dim=1, keepdim=True)
    if kind == "max":
        return torch.where(finite, labels / torch.where(largest > 0, largest, 1.0), labels)
    spread = _standard_deviation(labels, finite) if kind == "standard_deviation" else largest - smallest
    scaled = torch.where(spread > 0, (labels - smallest) / torch.where(spread > 0, spread, 1.0), 1.0)
    if kind == "max_min_max":
        scaled = scaled * largest
    if kind == "max_min_batch_mean":
        scaled = scaled * scaled[finite].mean()
    return torch.where(finite, scaled, labels)


def _standard_deviation(labels: Tensor, finite: Tensor) -> Tensor:
    count = finite.sum(dim=1, keepdim=True).clamp(min=1)
    kept = torch.where(finite, labels, 0.0)
    mean = kept.sum(dim=1, keepdim=True) / count
    return (torch.where(finite, labels - mean, 0.0).square().sum(dim=1, keepdim=True) / count).sqrt()
