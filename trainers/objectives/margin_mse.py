"""MarginMSE: a teacher gives the margin by which a document beats a hard negative.

Hofstätter, Althammer, Schröder, Sertkan and Hanbury 2020, "Improving Efficient Neural Ranking Models with
Cross-Architecture Knowledge Distillation".
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.text_encoder import TextEncoder
from trainers.objective import Comparisons
from trainers.objectives.pair_settings import MarginMseSettings
from trainers.objectives.pairs import Candidates, PairBatch, TripletObjective, Triplets, unit_vectors


def margin_mse_loss(
    positive_scores: Tensor, negative_scores: Tensor, teacher_positive_scores: Tensor, teacher_negative_scores: Tensor
) -> Tensor:
    """MSE(M_s(q, p+) - M_s(q, p-), M_t(q, p+) - M_t(q, p-)) over a batch: section 3.2; all arguments (n,)."""
    teacher_margins = teacher_positive_scores - teacher_negative_scores
    return torch.nn.functional.mse_loss(positive_scores - negative_scores, teacher_margins)


@dataclass(frozen=True)
class ScoredTriplets(PairBatch):
    """n triplets with the teacher's scores, float32 (n,)."""

    positive_scores: Tensor
    negative_scores: Tensor


class MarginMse(TripletObjective[MarginMseSettings]):
    """Trains one encoder for queries and documents on the margins of a teacher.

    Rows of a batch: ``query``, ``document``, ``hard_negatives`` (one) and their teacher scores, ``positive_score`` and
    ``hard_negative_scores``. Rows don't meet, so a batch may be cut over ranks as it comes.
    """

    columns: tuple[str, ...] = (*TripletObjective.columns, "positive_score", "hard_negative_scores")
    columns_from: ClassVar[str] = (
        "Name a teacher's run as teacher_scores of raytriever filter, which stores its scores."
    )

    def __init__(self, encoder: TextEncoder, settings: MarginMseSettings) -> None:
        super().__init__(encoder, settings)
        self.similarity = settings.similarity

    def collate(self, rows: pa.Table) -> ScoredTriplets:
        """Tokenises each distinct text once. Raises ``UserError`` where a row lacks its hard negative or a score."""
        triplets = super().collate(rows)
        positive = rows["positive_score"].to_numpy()
        negative = pc.list_flatten(rows["hard_negative_scores"]).to_numpy()
        unknown = ~(np.isfinite(positive) & np.isfinite(negative))
        if unknown.any():
            query = rows["query"][int(np.argmax(unknown))].as_py()
            raise UserError(
                f"Query {query[:60]!r} has a teacher score that is not a finite number. Make the batches again"
                " with the teacher's scores for every packed document and its hard negatives."
            )
        return ScoredTriplets(
            **vars(triplets), positive_scores=torch.tensor(positive), negative_scores=torch.tensor(negative)
        )

    def loss(self, queries: Tensor, documents: Tensor, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """``margin_mse_loss`` of the own triplets."""
        batch = cast(ScoredTriplets, candidates.batch)
        with torch.autocast(queries.device.type, enabled=False):
            triplets = Triplets.own(at_least_float32(queries), at_least_float32(documents), candidates)
            if self.settings.similarity == "cosine":
                triplets = Triplets(*map(unit_vectors, triplets))
            positive, negative = ((triplets.queries * texts).sum(dim=1) for texts in triplets[1:])
            teacher = [
                self.settings.teacher_scale * scores.to(positive.dtype)
                for scores in (batch.positive_scores, batch.negative_scores)
            ]
            loss = margin_mse_loss(positive, negative, *teacher)
        positive, negative = positive.detach(), negative.detach()
        return loss, {
            "margin_mean": (positive - negative).mean(),
            "teacher_margin_mean": (teacher[0] - teacher[1]).mean(),
            "accuracy": (positive > negative).float().mean(),
            "positive_similarity": positive.mean(),
            "negative_similarity": negative.mean(),
        }

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """A query's own triplet."""
        return Comparisons(
            len(rows), documents=2 * len(rows), positives=1.0, in_batch=0.0, hard=1.0, masked=0.0, offered=0
        )
