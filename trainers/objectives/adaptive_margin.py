"""Adaptive relevance margins: the encoder itself gives the margin that a triplet should have.

Gienapp, Deckers, Potthast and Scells 2025, "Learning Effective Representations for Retrieval Using Self-Distillation
with Adaptive Relevance Margins".
"""

import pyarrow as pa
import torch
from torch import Tensor

from retrieval.encoders.pooling import at_least_float32
from trainers.objective import Comparisons
from trainers.objectives.pair_settings import AdaptiveMarginSettings, ErrorFunction, Pairing
from trainers.objectives.pairs import Candidates, TripletObjective, Triplets, unit_vectors


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """phi of rows of unit length, (n, d) and (n, d): (n,)."""
    return (left * right).sum(dim=1)


def own_residuals(triplets: Triplets, margin: float | None) -> tuple[Tensor, Tensor]:
    """l_i = phi(q_i, d+_i) - phi(q_i, d-_i) - t_i, and t_i, each (n,): eq. 1 with t = ``margin``, eq. 2 without one.

    t_i = (1 + phi(d+_i, d-_i)) / 2 is not detached: it moves document and negative as the relevance margin does.
    """
    queries, positives, negatives = triplets
    relevance_margin = cosine(queries, positives) - cosine(queries, negatives)
    target = _target(cosine(positives, negatives), margin)
    return relevance_margin - target, target


def in_batch_residuals(
    triplets: Triplets, batch: Triplets, margin: float | None, pairing: Pairing = "paper"
) -> tuple[Tensor, Tensor]:
    """l_ij = phi(q_i, d+_i) - phi(q_i, d-_j) - t_ij, and t_ij, each (n, m): eq. 1 or 2 with d-_j for d-_i, as in eq. 5.

    ``triplets``: rows i, the n of this loss. ``batch``: rows j, all m of the batch, including these. ``pairing``
    "released" uses phi(q_j, d+_j) instead of phi(q_i, d+_i).
    """
    queries, positives, _ = triplets if pairing == "paper" else batch
    similarity = cosine(queries, positives).unsqueeze(1 if pairing == "paper" else 0)
    target = _target(triplets.positives @ batch.negatives.T, margin)
    return similarity - triplets.queries @ batch.negatives.T - target, target


def distributed_residuals(triplets: Triplets, batch: Triplets, pairing: Pairing = "paper") -> tuple[Tensor, Tensor]:
    """l_ij = phi(q_i, d+_i) - phi(q_i, d-_i) - t_ij, and t_ij = (1 + phi(d+_i, d-_j)) / 2, each (n, m): eq. 3.

    Arguments as for ``in_batch_residuals``; ``pairing`` "released" takes the relevance margin of row j for that of i.
    """
    queries, positives, negatives = triplets if pairing == "paper" else batch
    relevance_margin = cosine(queries, positives) - cosine(queries, negatives)
    target = _target(triplets.positives @ batch.negatives.T, None)
    return relevance_margin.unsqueeze(1 if pairing == "paper" else 0) - target, target


def _target(similarity: Tensor, margin: float | None) -> Tensor:
    return (1 + similarity) / 2 if margin is None else torch.full_like(similarity, margin)


def mean_error(residuals: Tensor, error: ErrorFunction = "squared") -> Tensor:
    """Mean of l^2 over all residuals (eq. 4, eq. 5), or of |l| or log(1 + exp(-l)): options of the authors' code."""
    match error:
        case "squared":
            return residuals.square().mean()
        case "absolute":
            return residuals.abs().mean()
        case "soft":
            return torch.nn.functional.softplus(-residuals).mean()


class AdaptiveMargin(TripletObjective[AdaptiveMarginSettings]):
    """Trains one encoder for queries and documents by the margins of triplets.

    Nothing is detached and no false negative is left out, as in the paper. The loss is computed in float32 (float64 for
    float64 vectors) whatever autocast says. A batch may be cut over ranks. A batch of one row has only its own
    negative, so its distributed target is the adaptive one.
    """

    similarity = "cosine"

    def loss(self, queries: Tensor, documents: Tensor, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """``mean_error`` of the own triplets' residuals, with the whole batch's negatives where they count."""
        with torch.autocast(queries.device.type, enabled=False):
            queries, documents = (unit_vectors(at_least_float32(vectors)) for vectors in (queries, documents))
            triplets = Triplets.own(queries, documents, candidates)
            residuals, target = self._residuals(triplets, documents)
            return mean_error(residuals, self.settings.error), self._metrics(triplets, target)

    def _residuals(self, triplets: Triplets, documents: Tensor) -> tuple[Tensor, Tensor]:
        settings = self.settings
        if not settings.uses_batch:
            return own_residuals(triplets, settings.margin)
        batch = Triplets(self.gather(triplets.queries), *documents.chunk(2))
        if settings.target == "distributed":
            return distributed_residuals(triplets, batch, settings.pairing)
        return in_batch_residuals(triplets, batch, settings.margin, settings.pairing)

    @torch.no_grad()
    def _metrics(self, triplets: Triplets, target: Tensor) -> dict[str, Tensor]:
        """Figures of the own triplets, and of the targets (the paper's fig. 6 has them before scaling)."""
        queries, positives, negatives = triplets
        positive, negative = cosine(queries, positives), cosine(queries, negatives)
        by_row = target.reshape(len(target), -1)
        extremes = self.gather(torch.stack([by_row.amin(dim=1), by_row.amax(dim=1)], dim=1))
        return {
            "target_min": extremes[:, 0].min(),
            "target_mean": target.mean(),
            "target_max": extremes[:, 1].max(),
            "margin_mean": (positive - negative).mean(),
            "accuracy": (positive > negative).float().mean(),
            "positive_similarity": positive.mean(),
            "negative_similarity": negative.mean(),
        }

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """A query's own triplet, and the other rows' negatives where they count."""
        count = len(rows)
        offered = count if self.settings.uses_batch else 0
        in_batch = max(0.0, offered - 1.0)
        return Comparisons(
            count, documents=2 * count, positives=1.0, in_batch=in_batch, hard=1.0, masked=0.0, offered=offered
        )
