"""REPLUG: a retriever learns which chunks of a batch a frozen language model finds most helpful for which.

The baseline of Revela (arXiv 2506.16552, appendix A.3), after "REPLUG: Retrieval-Augmented Black-Box Language Models"
(Shi et al. 2024), which has the two distributions the other way round in its divergence. The language model's scores
are made once, by ``raytriever score``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from pipelines.batches import BatchReader
from raytriever.settings.configuration import InputPath
from retrieval.encoders.pooling import at_least_float32
from trainers.objective import Outcome
from trainers.objectives.chunk_objective import (
    ChunkObjective,
    ChunkSettings,
    EncodedTwice,
    same_source_share,
)
from trainers.objectives.language_models import ScoreReader

if TYPE_CHECKING:
    from retrieval.encoders.text_encoder import TextEncoder
    from trainers.run import RunSettings


class ReplugSettings(ChunkSettings):
    """``scores``: how well each chunk foretells each other, from the same batches.

    ``token_reduction``: whether a chunk's log-likelihood is the mean over its tokens or their sum, which at the
    paper's temperature of 0.001 leaves one chunk all the weight. ``include_self``: the formula as printed, in which
    every chunk foretells itself best.
    """

    kind: Literal["replug"] = "replug"
    scores: InputPath
    similarity_temperature: float = Field(default=1e-3, gt=0)  # tau_r
    likelihood_temperature: float = Field(default=1e-3, gt=0)  # eta_m
    token_reduction: Literal["mean", "sum"] = "mean"
    include_self: bool = False

    def check_run(self, run: "RunSettings") -> None:
        """The scores are those of the batches that are trained on. Raises ``ValueError`` for validation on others."""
        if run.validation is not None and run.validation.kind == "batches":
            raise ValueError(
                "validation of kind batches has no scores of the language model: objective.scores are of the batches"
                " that are trained on. Validate by retrieval, or leave validation out"
            )


def replug_distributions(
    similarities: Tensor,
    negative_log_likelihoods: Tensor,
    similarity_temperature: float,
    likelihood_temperature: float,
    *,
    include_self: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, B) of the language model, P_lm(j | i), and of the retriever, P_ret(j | i).

    Revela, appendix A.3: softmax over j of -l_ij / eta_m and of s_ij / tau_r, with ``negative_log_likelihoods`` l_ij =
    -log p(D_i | D_j) and ``similarities`` s_ij, both (B, B). Without ``include_self`` j = i is left out: -inf.
    """
    likely = -negative_log_likelihoods / likelihood_temperature
    scores = similarities / similarity_temperature
    if not include_self:
        own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        likely, scores = likely.masked_fill(own, -torch.inf), scores.masked_fill(own, -torch.inf)
    return torch.log_softmax(likely, dim=1), torch.log_softmax(scores, dim=1)


def replug_loss(log_likelihood: Tensor, log_retrieval: Tensor) -> Tensor:
    """mean_i KL(P_lm(. | i) || P_ret(. | i)), Revela, appendix A.3: a scalar.

    Both arguments are log-probabilities (B, B) of ``replug_distributions``. Where P_lm is 0 nothing is added, whatever
    P_ret is.
    """
    probabilities = log_likelihood.exp()
    absent = probabilities == 0
    difference = log_likelihood.masked_fill(absent, 0.0) - log_retrieval.masked_fill(absent, 0.0)
    return (probabilities * difference).sum(dim=1).mean()


@dataclass(frozen=True)
class ReplugBatch:
    """B chunks, and the negative log-likelihood of each (rows) given each (columns): float32 (B, B)."""

    chunks: EncodedTwice
    negative_log_likelihoods: Tensor


class Replug(ChunkObjective[ReplugBatch]):
    """Trains a retriever with ``replug_loss`` on cosines."""

    columns: ClassVar[tuple[str, ...]] = (*ChunkObjective.columns, "batch", "epoch")

    def __init__(self, retriever: "TextEncoder", settings: ReplugSettings) -> None:
        super().__init__(retriever, settings)
        self.settings = settings
        self.similarity = "cosine"
        self._scores = ScoreReader(settings.scores)

    def check_batches(self, batches: BatchReader) -> None:
        """The scores are of these batches too. Raises ``UserError`` otherwise."""
        super().check_batches(batches)
        self._scores.require_batches(batches)

    def collate(self, rows: pa.Table, first_row: int = 0) -> ReplugBatch:  # noqa: ARG002
        """Tokenises the chunks and fetches their scores."""
        epoch, batch = rows["epoch"][0].as_py(), rows["batch"][0].as_py()
        scores = self._scores.read(epoch, batch, mean=self.settings.token_reduction == "mean")
        return ReplugBatch(self.collate_chunks(rows), torch.from_numpy(scores))

    def forward(self, batch: ReplugBatch) -> Outcome:
        """The loss of one stored batch."""
        settings = self.settings
        queries, passages = self.encode_sides(batch.chunks)
        with torch.autocast(queries.device.type, enabled=False):
            queries, passages = (
                torch.nn.functional.normalize(at_least_float32(side), dim=-1) for side in (queries, passages)
            )
            likely, retrieved = replug_distributions(
                queries @ passages.T,
                batch.negative_log_likelihoods.to(queries.dtype),
                settings.similarity_temperature,
                settings.likelihood_temperature,
                include_self=settings.include_self,
            )
            loss = replug_loss(likely, retrieved)
        agree = (likely.argmax(dim=1) == retrieved.argmax(dim=1)).float().mean()
        shares = {"same_source_share": same_source_share(retrieved.exp(), batch.chunks.sources)}
        return Outcome(loss, {"agreement": agree, **shares}, len(queries), batch.chunks.tokens)
