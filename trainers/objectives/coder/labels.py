"""Relevance labels of candidate lists before they become a target: levels, normalisations, and smoothing.

``labels`` (B, N): graded relevance, -inf where a candidate is not labelled or is padding. Levels and normalisations
keep -inf. Smoothing gives labels to candidates without a judgment, by the overlap of their neighbourhoods with those of
the positives. It is the evidence-based smoothing of Zerveas et al. 2023, "Enhancing the Ranking Context of Dense
Retrieval through Reciprocal Nearest Neighbors". The reciprocal neighbours and the extended Jaccard similarity are those
of Zhong et al. 2017, "Re-ranking Person Re-identification with k-reciprocal Encoding". Its functions are of m items:
``similarities`` (m, m) of any float type, each item's with all.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.vectors import StoredVectors
from trainers.objectives.coder.settings import Aggregation, Normalization, SmoothingSettings, Weights

_AGGREGATED: dict[Aggregation, Callable[..., Tensor]] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}
_OVERLAP = 2 / 3  # of a neighbour's own neighbours: more than this share in common, and they are taken in
_EXPONENT = 2.4
_KEPT_BY_POSITIVES = 0.8  # of 'fully'


def at_level(labels: Tensor, level: float) -> Tensor:
    """Labels below ``level`` count as none: 1 is lenient, 2 strict on the scale of TREC."""
    return labels.masked_fill(labels < level, -torch.inf)


def binary(labels: Tensor) -> Tensor:
    """Every label is 1: an even target over the labelled."""
    return torch.where(labels.isfinite(), torch.ones_like(labels), labels)


def normalized(labels: Tensor, kind: Normalization) -> Tensor:
    """Labels of each query put on one scale, by its finite labels v.

    max: v / max. max_min: (v - min) / (max - min). max_min_max: that times max. max_min_batch_mean: max_min times the
    mean of all of the batch's. standard_deviation: (v - min) / population standard deviation. A query with equal labels
    has no spread to divide by: its labels become 1 (times the kind's factor).
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


def nearest(similarities: Tensor, neighbours: int) -> Tensor:
    """The most similar items of each, itself mostly among them, best first: int64 (m, neighbours + 1), m at most."""
    ranked = torch.argsort(similarities, dim=1, descending=True, stable=True)
    return ranked[:, : neighbours + 1]


def reciprocal_neighbours(ranked: Tensor, width: int) -> Tensor:
    """bool (m, m): whether two items are among each other's first ``width`` + 1 of ``ranked`` (m, k + 1)."""
    among = torch.zeros(len(ranked), len(ranked), dtype=torch.bool, device=ranked.device)
    among.scatter_(1, ranked[:, : width + 1], True)
    return among & among.T


def neighbourhoods(similarities: Tensor, neighbours: int, trust: float, weights: Weights) -> tuple[Tensor, Tensor]:
    """Each item's members as weights that sum to 1, (m, m), and ``nearest``.

    Members are the reciprocal neighbours. The closer neighbours of each of these are members too, if most of them are
    members already. With inner products of vectors of very different lengths, an item may be nobody's neighbour, not
    even its own. It has no members then, a row of zeros.
    """
    ranked = nearest(similarities, neighbours)
    width = ranked.shape[1] - 1
    members = reciprocal_neighbours(ranked, width)
    closer = reciprocal_neighbours(ranked, round(trust * (width + 1)) + 1)
    common = members.to(similarities.dtype) @ closer.to(similarities.dtype).T
    taken = members & (common > _OVERLAP * closer.sum(dim=1))
    members = members | (taken.to(similarities.dtype) @ closer.to(similarities.dtype) > 0)
    values = torch.where(members, similarities, 0.0)
    if weights == "exponential":  # exp(x) - 1 over the largest exp(x) of the row, which may overflow
        largest = (_EXPONENT * values).amax(dim=1, keepdim=True).clamp(min=0)
        values = torch.exp(_EXPONENT * values - largest) - torch.exp(-largest)
    return _quotients(values, values.sum(dim=1, keepdim=True)), ranked


def jaccard(probes: Tensor, rows: Tensor) -> Tensor:
    """Weighted Jaccard similarities (p, m) of ``probes`` (p, n) and ``rows`` (m, n); 0 of two rows of zeros."""
    extremes = torch.minimum, torch.maximum
    return _quotients(*(torch.stack([extreme(row, rows).sum(dim=1) for row in probes]) for extreme in extremes))


def _quotients(values: Tensor, totals: Tensor) -> Tensor:
    """``values / totals``, 0 where a total is."""
    return torch.where(totals == 0, 0.0, values / torch.where(totals == 0, 1.0, totals))


def mixed_similarities(similarities: Tensor, probes: Tensor, settings: SmoothingSettings) -> Tensor:
    """Similarities of the items ``probes`` int64 (p,) with all: (p, m), part plain, part of neighbourhoods."""
    weights, ranked = neighbourhoods(similarities, settings.neighbours, settings.trust, settings.weights)
    expanded = weights[ranked[:, : settings.expansion]].mean(dim=1)
    return settings.mix * similarities[probes] + (1 - settings.mix) * jaccard(expanded[probes], expanded)


def smoothed_labels(similarities: Tensor, grades: Tensor, settings: SmoothingSettings) -> Tensor:
    """Labels (m - 1,) of all candidates; items are the query, R positives with ``grades`` (R,), other candidates."""
    positives = len(grades)
    probes = torch.arange(1, positives + 1, device=similarities.device)
    evidence = mixed_similarities(similarities, probes, settings)[:, 1:] * grades.unsqueeze(1)
    labels = _AGGREGATED[settings.aggregation](evidence, dim=0)
    if settings.redistribution == "fully":
        others = labels[positives:]
        shared = (1 - _KEPT_BY_POSITIVES) * grades.sum() * _quotients(others, others.sum())
        labels = torch.cat([_KEPT_BY_POSITIVES * grades, shared])
    boost = torch.ones_like(labels)
    boost[:positives] = settings.boost
    return labels * boost


class LabelSmoother:
    """Smooths the labels of whole batches by the vectors of their queries and documents as they were embedded."""

    def __init__(self, vectors: StoredVectors, settings: SmoothingSettings) -> None:
        self._uri, self._settings = vectors.uri, settings
        self._queries = vectors.part("queries")
        self._queries.require_all()
        self._row_of = {name: row for row, name in enumerate(self._queries.ids().to_pylist())}

    def smoothed(self, query_ids: Sequence[str], labels: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        """``labels`` (B, N), -inf where there is none, with those of the first unlabelled ones of each list filled in.

        ``documents`` (M + 1, d) and ``places`` (B, N) as in ``Pool``. A query without a label stays so. Raises
        ``UserError`` for one that was not embedded.
        """
        missing = [name for name in query_ids if name not in self._row_of]
        if missing:
            raise UserError(f"{self._uri} has no vector of query {missing[0]!r}. Embed the queries of the collection.")
        queries = self._queries.gather(np.array([self._row_of[name] for name in query_ids]))
        result = labels.clone()
        for place, query in enumerate(torch.from_numpy(queries)):
            is_labelled = labels[place].isfinite()
            positives = is_labelled.nonzero().squeeze(1)
            if not len(positives):
                continue
            others = (~is_labelled & (places[place] < len(documents) - 1)).nonzero().squeeze(1)
            items = torch.cat([positives, others[: self._settings.depth]])
            vectors = torch.cat([query.unsqueeze(0), documents[places[place, items]].float()])
            result[place, items] = smoothed_labels(vectors @ vectors.T, labels[place, positives], self._settings)
        return result
