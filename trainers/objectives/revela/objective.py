"""Revela: a retriever learns from a language model that reads the chunks of a batch through its similarities.

"Revela: Dense Retriever Learning via Language Modeling" (arXiv 2506.16552). Predicting the next token trains both; no
text has a label.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional

from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.language_model import load_language_model
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.pretrained import LocatedModels
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from trainers.objective import Outcome
from trainers.objectives.chunk_settings import Precision, RevelaSettings
from trainers.objectives.chunks import ChunkObjective, EncodedTwice, same_source_share
from trainers.objectives.revela.language_model import InBatchLanguageModel

_LIVE = 1e-3  # of p (1 - p), the derivative of a softmax weight by its own logit


def in_batch_similarity(
    query_vectors: Tensor, passage_vectors: Tensor, temperature: float, precision: Precision = "float32"
) -> Tensor:
    """Sim, (B, B): row i says how much of each other document j the prediction of document i reads.

    Softmax over j of cos(query i, passage j) / ``temperature`` without j = i, which is exactly 0; other weights sum to
    1. ``query_vectors`` and ``passage_vectors``: (B, d), of any norm; one tensor for both is the paper's formula.

    ``precision``: of cosines and softmax. 'float32' (float64 for float64 vectors) whatever autocast says. The authors
    trained with 'bfloat16'. Its cosines are up to 0.004 apart, so at a temperature of 1e-4 a row is either one-hot or
    tied. The result is float32 (float64) in both. Raises ``UserError`` for a batch of one document.
    """
    if len(query_vectors) < 2:
        raise UserError(
            f"In-batch attention needs at least two documents a batch, but this batch has {len(query_vectors)}."
            " Make larger batches (16 is usual; with two, the retriever gets no gradient)."
        )
    with torch.autocast(query_vectors.device.type, enabled=False):
        queries, passages = at_least_float32(query_vectors), at_least_float32(passage_vectors)
        exact = queries.dtype
        if precision == "bfloat16":
            queries, passages = queries.bfloat16(), passages.bfloat16()
        cosines = functional.normalize(queries, dim=-1) @ functional.normalize(passages, dim=-1).T
        itself = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
        return (cosines / temperature).masked_fill(itself, -torch.inf).softmax(dim=-1).to(exact)


@torch.no_grad()
def row_entropy(similarity: Tensor) -> Tensor:
    """Mean entropy of the rows of Sim (B, B) in nats: 0 where all are one-hot, at most log(B - 1)."""
    terms: Tensor = torch.special.entr(at_least_float32(similarity))
    return terms.sum(dim=-1).mean()


@torch.no_grad()
def live_row_share(similarity: Tensor) -> Tensor:
    """Share of the rows of Sim (B, B) that pass a gradient on to the retriever: some weight p with p (1 - p) > 1e-3."""
    weights = at_least_float32(similarity)
    return (weights * (1 - weights)).amax(dim=-1).gt(_LIVE).to(weights.dtype).mean()


@dataclass(frozen=True)
class RevelaBatch:
    """B chunks as the retriever and as the language model read them: its ``input_ids`` and ``attention_mask``."""

    chunks: EncodedTwice
    language_model: dict[str, Tensor]


class Revela(ChunkObjective[RevelaBatch, RevelaSettings]):
    """Trains a retriever, and a language model unless that is frozen, by the language model's next-token loss."""

    similarity = "cosine"

    def __init__(
        self, retriever: TextEncoder, language_model: InBatchLanguageModel, tokenizer: Any, settings: RevelaSettings
    ) -> None:
        super().__init__(retriever, settings)
        self.language_model = language_model
        self._tokenizer = tokenizer

    @classmethod
    def build(cls, settings: RevelaSettings, towers: Towers, models: LocatedModels, seed: int, /) -> "Revela":
        """Around the one encoder and the language model. Raises ``UserError`` for one without what it needs."""
        wanted = settings.language_model
        model, tokenizer = load_language_model(models["objective.language_model"].path, wanted.dropout)
        if wanted.lora is not None:
            add_adapter(model, wanted.lora, seed)
        language_model = InBatchLanguageModel(
            model,
            value_normalization=settings.value_normalization,
            frozen=wanted.frozen,
            activation_checkpointing=wanted.activation_checkpointing,
            recompute_reading=not wanted.activation_checkpointing,  # else a third time
        )
        return cls(towers.query, language_model, tokenizer, settings)

    def collate(self, rows: pa.Table) -> RevelaBatch:
        """Tokenises the chunks for both models. Raises ``UserError`` where none has two tokens."""
        texts = rows["document"].to_pylist()
        limit = self.settings.language_model.max_length
        tokens = self._tokenizer(texts, truncation=True, max_length=limit, padding=True, return_tensors="pt")
        features = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        if features["input_ids"].shape[1] < 2:
            raise UserError("no chunk has two tokens, so there is no next token to predict. Cut longer chunks.")
        return RevelaBatch(self.collate_chunks(rows), features)

    def forward(self, batch: RevelaBatch) -> Outcome:
        """The loss of one stored batch: the mean over all tokens of its chunks that have one before them."""
        queries, passages = self.encode_sides(batch.chunks)
        settings = self.settings
        weights = in_batch_similarity(queries, passages, settings.similarity_temperature, settings.similarity_precision)
        loss, tokens = self.language_model(**batch.language_model, similarity=weights)
        metrics = {
            "row_entropy": row_entropy(weights),
            "live_row_share": live_row_share(weights),
            "same_source_share": same_source_share(weights, batch.chunks.sources),
        }
        return Outcome(loss, metrics, len(weights), batch.chunks.tokens + tokens)
