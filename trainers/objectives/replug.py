"""REPLUG: a frozen language model teaches a retriever which chunks of a batch help to predict each chunk.

The baseline of Revela (arXiv 2506.16552, appendix A.3), after "REPLUG: Retrieval-Augmented Black-Box Language Models"
(Shi et al. 2024), which has the two distributions the other way round in its divergence. ``raytriever score`` makes the
language model's scores once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence

from pipelines.batches import BATCHES, BatchFiles, BatchReader
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import schema_of
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from trainers.objective import Outcome
from trainers.objectives.chunk_settings import SCORES, ReplugSettings
from trainers.objectives.chunks import ChunkObjective, EncodedTwice, same_source_share

SCHEMA = schema_of(negative_log_likelihood=pa.list_(pa.float32()), tokens=pa.int32())
"""Stored scores. One row group is one batch, and its row i is chunk i. It holds the summed negative log-likelihood of
the chunk's tokens given each chunk of the batch, itself included, and the number of tokens."""

_LOGITS_AT_ONCE = 1 << 28  # a GiB of float32


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
        likely.fill_diagonal_(-torch.inf)
        scores.fill_diagonal_(-torch.inf)
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


@torch.inference_mode()
def conditional_likelihoods(
    model: Any, contexts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Summed -log p(tokens of target i | tokens of context j), float32 (targets, contexts), in nats.

    Each pair is scored as the one sequence [context ; target] with positions from 0, without padding in between. Every
    token of the target counts, also the first. A context runs through ``model`` (a Hugging Face causal language model
    in evaluation mode) once, and its keys and values serve all targets. So n contexts and n targets of L tokens cost n
    + n² passes of L tokens instead of n² of 2 L. No text may be empty.
    """
    first = torch.tensor([target[0] for target in targets])
    columns = []
    for context in contexts:
        device = next(model.parameters()).device
        read = model(input_ids=torch.tensor([context], device=device), use_cache=True, logits_to_keep=1)
        likelihoods = torch.log_softmax(read.logits[0, -1].float(), dim=-1).cpu()[first]
        columns.append(likelihoods + _behind(model, read.past_key_values, targets, read.logits.shape[-1]))
    scores: NDArray[np.float32] = -torch.stack(columns, dim=1).numpy()
    return scores


def _behind(model: Any, cache: Any, targets: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Summed log p of each target's tokens from the second on, behind a cached context: float32 (targets,)."""
    ids, mask = _padded(targets, next(model.parameters()).device)
    at_once = max(1, _LOGITS_AT_ONCE // (ids.shape[1] * vocabulary))
    sums = []
    for rows, kept in zip(torch.split(ids, at_once), torch.split(mask, at_once), strict=True):
        before = kept.new_ones(len(kept), cache.get_seq_length())
        logits = model(
            input_ids=rows,
            attention_mask=torch.cat([before, kept], dim=1),
            past_key_values=_copies(cache, len(rows)),
            use_cache=True,
        ).logits
        losses = cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        sums.append(-(losses.view(len(rows), -1) * kept[:, 1:]).sum(dim=1))
    return torch.cat(sums).cpu()


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids with zeros behind them, and a mask; int64 (texts, longest)."""
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = pad_sequence([torch.ones(len(text), dtype=torch.int64) for text in texts], batch_first=True)
    return ids.to(device), mask.to(device)


def _copies(cache: Any, count: int) -> Any:
    """The keys and values of one context, for so many texts that follow it."""
    from transformers import DynamicCache

    found = DynamicCache()
    for number, layer in enumerate(cache.layers):
        found.update(layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1), number)
    return found


def score_table(sums: NDArray[np.float32], tokens: Sequence[int]) -> pa.Table:
    """One batch as it is stored: ``sums`` (B, B), ``tokens`` of each of the B chunks."""
    return pa.table([sums.tolist(), tokens], schema=SCHEMA)


class ScoreReader:
    """Reads stored scores by (epoch, batch number). Raises ``UserError`` where the artifact holds none."""

    def __init__(self, uri: str) -> None:
        self.artifact = Artifact(uri, SCORES)
        self._files = BatchFiles(self.artifact)

    def require_batches(self, batches: BatchReader) -> None:
        """Raises ``UserError`` unless the scores are of just these batches."""
        scored = self.artifact.manifest["inputs"].get(BATCHES, "unknown")
        if scored != batches.fingerprint:
            raise UserError(
                f"The scores in {self.artifact.uri} belong to other batches ({scored[:12]}) than {batches.uri}"
                f" ({batches.fingerprint[:12]}). Score these (raytriever score), or train on those."
            )

    def read(self, epoch: int, batch: int, *, mean: bool) -> NDArray[np.float32]:
        """Negative log-likelihoods (B, B) of each chunk (rows) given each (columns): sums, or ``mean`` over tokens."""
        table = self._files.read(epoch, batch)
        flat = table["negative_log_likelihood"].combine_chunks().flatten().to_numpy()
        sums: NDArray[np.float32] = flat.reshape(len(table), -1).copy()
        return sums / table["tokens"].to_numpy()[:, None].astype(sums.dtype) if mean else sums


@dataclass(frozen=True)
class ReplugBatch:
    """B chunks, and the negative log-likelihood of each (rows) given each (columns): float32 (B, B)."""

    chunks: EncodedTwice
    negative_log_likelihoods: Tensor


class Replug(ChunkObjective[ReplugBatch, ReplugSettings]):
    """Trains a retriever with ``replug_loss`` on cosines."""

    columns: tuple[str, ...] = (*ChunkObjective.columns, "batch", "epoch")
    similarity = "cosine"

    def __init__(self, retriever: TextEncoder, settings: ReplugSettings, scores: ScoreReader) -> None:
        super().__init__(retriever, settings)
        self._scores = scores

    @classmethod
    def build(cls, settings: ReplugSettings, towers: Towers, *_: Any) -> Self:
        """Around the one encoder, with the scores that ``settings`` name."""
        return cls(towers.query, settings, ScoreReader(settings.scores))

    def check_batches(self, batches: BatchReader) -> None:
        """The scores are of these batches too. Raises ``UserError`` otherwise."""
        super().check_batches(batches)
        self._scores.require_batches(batches)

    def collate(self, rows: pa.Table) -> ReplugBatch:
        """Tokenises the chunks and fetches their scores."""
        epoch, batch = rows["epoch"][0].as_py(), rows["batch"][0].as_py()
        scores = self._scores.read(epoch, batch, mean=self.settings.token_reduction == "mean")
        return ReplugBatch(self.collate_chunks(rows), torch.from_numpy(scores))

    def forward(self, batch: ReplugBatch) -> Outcome:
        """The loss of one stored batch."""
        settings = self.settings
        queries, passages = self.encode_sides(batch.chunks)
        with torch.autocast(queries.device.type, enabled=False):
            queries, passages = (normalize(at_least_float32(side), dim=-1) for side in (queries, passages))
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
