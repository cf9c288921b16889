"""MarginMSE: a teacher says by how much a document beats a hard negative.

Hofstätter, Althammer, Schröder, Sertkan and Hanbury 2020, "Improving Efficient Neural Ranking Models with
Cross-Architecture Knowledge Distillation".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import Field, model_validator
from torch import Tensor

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.specification import Role
from trainers.objective import Comparisons, Objective, Outcome
from trainers.objectives.pair_objective import PairSettings
from trainers.objectives.triplets import (
    TRIPLET_COLUMNS,
    Triplets,
    encode_triplets,
    read_triplets,
    unit_vectors,
)


class MarginMseSettings(PairSettings):
    """How the student's similarity is measured; ``teacher_scale`` multiplies the teacher's margins.

    Inner products can reach a cross-encoder's scores, as the paper has it; cosines can't: scale the margins down.
    """

    kind: Literal["margin_mse"] = "margin_mse"
    similarity: Literal["inner_product", "cosine"] = "inner_product"
    teacher_scale: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _rows_do_not_meet(self) -> Self:
        if self.share_negatives == "step":
            raise ValueError("share_negatives 'step' has no negatives to share: a row is compared with its own alone")
        return self


def margin_mse_loss(
    positive_scores: Tensor, negative_scores: Tensor, teacher_positive_scores: Tensor, teacher_negative_scores: Tensor
) -> Tensor:
    """MSE(M_s(q, p+) - M_s(q, p-), M_t(q, p+) - M_t(q, p-)) over a batch: section 3.2; all arguments (n,)."""
    teacher_margins = teacher_positive_scores - teacher_negative_scores
    return torch.nn.functional.mse_loss(positive_scores - negative_scores, teacher_margins)


@dataclass(frozen=True)
class ScoredTriplets:
    """n triplets with the teacher's scores, float32 (n,)."""

    triplets: Triplets
    positive_scores: Tensor
    negative_scores: Tensor


class MarginMse(Objective[ScoredTriplets]):
    """Trains one encoder for queries and documents on the margins of a teacher.

    Rows of a batch: ``query``, ``document``, ``hard_negatives`` (one) and their teacher scores, ``positive_score`` and
    ``hard_negative_scores``. Rows don't meet, so a batch may be cut over ranks as it comes.
    """

    columns: ClassVar[tuple[str, ...]] = (*TRIPLET_COLUMNS, "positive_score", "hard_negative_scores")
    columns_from: ClassVar[str] = (
        "Name a teacher's run as teacher_scores of raytriever filter, which stores its scores."
    )
    accepts_slices: ClassVar[bool] = True

    def __init__(self, encoder: Any, settings: MarginMseSettings) -> None:
        super().__init__()
        self.text_encoder = encoder
        self.settings = settings
        self.similarity = settings.similarity

    def collate(self, rows: pa.Table, first_row: int = 0) -> ScoredTriplets:
        """Tokenises each distinct text once. Raises ``UserError`` where a row lacks its hard negative or a score."""
        lengths = self.settings.query_max_length, self.settings.document_max_length
        triplets = read_triplets(rows, self.text_encoder, *lengths, self.settings.chunk_size, first_row)
        positive = rows["positive_score"].to_numpy()
        negative = pc.list_flatten(rows["hard_negative_scores"]).to_numpy()
        unknown = ~(np.isfinite(positive) & np.isfinite(negative))
        if unknown.any():
            raise UserError(
                f"Row {first_row + int(np.argmax(unknown))} has a teacher score that is no finite number. Make the"
                " batches again with scores of the teacher for every packed document and its hard negatives."
            )
        return ScoredTriplets(triplets, torch.tensor(positive), torch.tensor(negative))

    def forward(self, batch: ScoredTriplets) -> Outcome:
        """The loss over this slice's triplets."""
        encoded = encode_triplets(self.text_encoder, batch.triplets, cached=self.settings.gradient_cache)
        with torch.autocast(encoded[0].device.type, enabled=False):
            queries, positives, negatives = map(at_least_float32, encoded)
            if self.settings.similarity == "cosine":
                queries, positives, negatives = map(unit_vectors, (queries, positives, negatives))
            positive, negative = ((queries * documents).sum(dim=1) for documents in (positives, negatives))
            teacher = [
                self.settings.teacher_scale * scores.to(positive.dtype)
                for scores in (batch.positive_scores, batch.negative_scores)
            ]
            loss = margin_mse_loss(positive, negative, *teacher)
        metrics = _metrics(positive.detach(), negative.detach(), teacher[0] - teacher[1])
        return Outcome(loss, metrics, len(batch.triplets), batch.triplets.tokens)

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """A query's own triplet."""
        return Comparisons(
            len(rows), documents=2 * len(rows), positives=1.0, in_batch=0.0, hard=1.0, masked=0.0, offered=0
        )

    def encoder(self, role: Role) -> Any:  # noqa: ARG002
        """The one encoder."""
        return self.text_encoder

    def export(self, folder: Path) -> None:
        """Writes the encoder's own folder."""
        self.text_encoder.save(folder)


def _metrics(positive: Tensor, negative: Tensor, teacher_margins: Tensor) -> dict[str, Tensor]:
    return {
        "margin_mean": (positive - negative).mean(),
        "teacher_margin_mean": teacher_margins.mean(),
        "accuracy": (positive > negative).float().mean(),
        "positive_similarity": positive.mean(),
        "negative_similarity": negative.mean(),
    }
