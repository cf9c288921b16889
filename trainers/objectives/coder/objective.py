"""CODER: a query encoder trained on whole lists of candidates. The documents' vectors stay fixed.

"CODER: An efficient framework for improving retrieval through COntextual Document Embedding Reranking" (Zerveas et al.
2022). Gradients reach the query encoder and the scoring module, so any index of the documents stays in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import require_same_origin
from raytriever.errors import UserError
from retrieval.encoders.list_scorer import ListScorer, save_list_scorer
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.specification import ListScorerForm, Role
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from retrieval.vectors import StoredVectors
from trainers.engine.gradient_cache import Chunks, encode_chunks
from trainers.objective import Comparisons, Objective, Outcome
from trainers.objectives.coder.candidates import CandidateList, DocumentVectors, compose_lists, padded, stored_lists
from trainers.objectives.coder.labels import LabelSmoother, at_level, binary, normalized
from trainers.objectives.coder.losses import (
    info_nce_loss,
    list_metrics,
    list_net_loss,
    max_margin_loss,
    mean_over_labelled,
)
from trainers.objectives.coder.settings import (
    CoderSettings,
    TransformerScoring,
)

_SMALLEST_NORM = 1e-6


def list_similarities(queries: Tensor, documents: Tensor, places: Tensor, similarity: str) -> Tensor:
    """Similarities of B queries with N candidates each, (B, N), in float32 (float64 for float64 queries).

    ``queries`` (B, d); ``documents`` (M + 1, d), their last a zero vector; ``places`` int64 (B, N), each candidate's
    among them. Whatever ``similarity`` is, a candidate that isn't there has 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries = at_least_float32(queries)
        documents = documents.to(queries.dtype)
        if similarity == "cosine":
            queries = nn.functional.normalize(queries, dim=-1, eps=_SMALLEST_NORM)
            documents = nn.functional.normalize(documents, dim=-1, eps=_SMALLEST_NORM)
        # all with all: lists share documents, and up to d queries it takes no more memory than the documents themselves
        return (queries @ documents.T).gather(1, places)


@dataclass(frozen=True)
class CoderBatch:
    """B queries with N candidates each.

    ``documents``: float16 (M + 1, d), vectors of the distinct ones, the last of zeros. ``places``: int64 (B, N), each
    candidate's among them, M behind a list's end. ``labels``: float32 (B, N), -inf for none.
    """

    queries: Chunks
    places: Tensor
    labels: Tensor
    documents: Tensor
    tokens: int


class Coder(Objective[CoderBatch]):
    """Trains a query encoder by one of the losses of ``losses``; queries without a label are skipped and counted."""

    columns: tuple[str, ...] = ("query_id", "query", "candidate_rows", "candidate_relevance", "epoch")

    def __init__(self, encoder: TextEncoder, settings: CoderSettings, vectors: StoredVectors) -> None:
        super().__init__()
        self.query_encoder = encoder
        self.settings = settings
        self._vectors = vectors
        self._documents = DocumentVectors(vectors)
        self._smoother = LabelSmoother(vectors, settings.smoothing) if settings.smoothing else None
        self._list_scorer = None
        if isinstance(settings.scoring, TransformerScoring):
            form = ListScorerForm.model_validate(settings.scoring.model_dump(include=set(ListScorerForm.model_fields)))
            self._list_scorer = ListScorer(form, vectors.contract.dimension, settings.seed)
        self._is_frozen = settings.scoring.query_encoder == "frozen"
        if self._is_frozen:
            self.query_encoder.requires_grad_(False)

    @classmethod
    def build(cls, settings: CoderSettings, towers: Towers, *_: Any) -> "Coder":
        """Around the one encoder, as one of queries. Raises ``UserError`` where the vectors don't fit it."""
        encoder, vectors = towers.query, StoredVectors(settings.documents)
        fresh = any(".lora_" in name for name, _ in encoder.named_parameters())
        if settings.scoring.query_encoder == "frozen" and fresh:
            raise UserError(
                "objective.scoring.query_encoder is 'frozen', but lora adds weights to it, which would never be"
                " trained. Set it to 'trained', or leave lora out."
            )
        fit_to_documents(encoder, vectors, other_encoder=settings.other_encoder)
        objective = cls(encoder, settings, vectors)
        scorer = objective.list_scorer
        update = {"list_scorer": None if scorer is None else str(scorer.form)}
        encoder.contract = encoder.contract.model_copy(update=update)
        return objective

    @property
    def document_vectors(self) -> StoredVectors:
        """The fixed vectors that the queries are trained for, and searched in."""
        return self._vectors

    @property
    def list_scorer(self) -> ListScorer | None:
        """The module that scores lists as a whole, where ``scoring`` asks for one."""
        return self._list_scorer

    def train(self, mode: bool = True) -> Self:
        """A frozen query encoder stays as it is in use."""
        super().train(mode)
        self.query_encoder.train(mode and not self._is_frozen)
        return self

    def check_batches(self, batches: BatchReader) -> None:
        """Lists and vectors are of one collection."""
        require_same_origin("collection", batches.artifact, self._vectors)

    def collate(self, rows: pa.Table) -> CoderBatch:
        """Tokenises the queries and fetches the candidates' vectors.

        Raises ``UserError`` where a list names a document that has no vector.
        """
        settings = self.settings
        lists = self._lists(rows)
        document_rows, labels = padded(lists)
        features = self.query_encoder.tokenize(rows["query"].to_pylist(), "query", settings.query_max_length)
        pool = self._documents.pool(document_rows)
        documents = self._documents.gather(pool.rows)
        labels = at_level(labels, settings.relevance_level)
        if self._smoother is not None:
            labels = self._smoother.smoothed(rows["query_id"].to_pylist(), labels, pool.places, documents)
        return CoderBatch(
            queries=settings.cut(features, self.query_encoder),
            places=pool.places,
            labels=self._targets(labels),
            documents=documents,
            tokens=int(features["attention_mask"].sum()),
        )

    def _lists(self, rows: pa.Table) -> list[CandidateList]:
        settings = self.settings
        stored = zip(rows["epoch"].to_pylist(), rows["query_id"].to_pylist(), strict=True)
        return compose_lists(
            stored_lists(rows),
            [f"{settings.seed} {epoch} {query}" for epoch, query in stored],
            level=settings.relevance_level,
            candidates=settings.candidates,
            negatives=settings.negatives,
            retrieved=settings.retrieved_negatives,
            documents=self._documents.total,
        )

    def _targets(self, labels: Tensor) -> Tensor:
        labels = binary(labels) if self.settings.binary_labels else labels
        labels = normalized(labels, self.settings.label_normalization)
        return at_level(labels, self.settings.smoothing.minimum) if self.settings.smoothing else labels

    def forward(self, batch: CoderBatch) -> Outcome:
        """The mean loss of the queries that have a label."""
        queries = encode_chunks(self.query_encoder, batch.queries, cached=self.settings.gradient_cache)
        scores = self._scores(queries, batch)
        present = batch.places < len(batch.documents) - 1
        losses = self._losses(scores / self.settings.temperature, batch.labels, present)
        loss = mean_over_labelled(losses, batch.labels, present)
        return Outcome(loss, list_metrics(scores, batch.labels, present), len(queries), batch.tokens)

    def _scores(self, queries: Tensor, batch: CoderBatch) -> Tensor:
        if self._list_scorer is not None:
            scores: Tensor = self._list_scorer(queries, batch.documents, batch.places)
            return scores
        return list_similarities(queries, batch.documents, batch.places, self.settings.similarity)

    def _losses(self, scores: Tensor, labels: Tensor, present: Tensor) -> Tensor:
        settings = self.settings
        match settings.loss:
            case "list_net":
                return list_net_loss(scores, labels, present)
            case "info_nce":
                return info_nce_loss(scores, labels, present)
        by_width = settings.margin_divisor == "padded_width"
        return max_margin_loss(scores, labels, present, settings.relevance_level, divide_by_width=by_width)

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """The lists as they are composed; no document is encoded, ``documents`` counts those that are looked up."""
        lists = self._lists(rows)
        positives = _mean([int((found.grades >= self.settings.relevance_level).sum()) for found in lists])
        others = _mean([len(found.rows) for found in lists]) - positives
        in_batch = 0.0
        if self.settings.negatives == "in_batch":
            stored = stored_lists(rows)
            in_batch = _mean([int((~np.isin(a.rows, b.rows)).sum()) for a, b in zip(lists, stored, strict=True)])
        return Comparisons(
            queries=len(rows),
            documents=len(np.unique(np.concatenate([found.rows for found in lists]))),
            positives=positives,
            in_batch=in_batch,
            hard=others - in_batch,
            masked=0.0,
        )

    def encoder(self, role: Role) -> TextEncoder:  # noqa: ARG002
        """The query encoder: documents are never encoded, ``document_vectors`` has them."""
        return self.query_encoder

    def export(self, folder: Path) -> None:
        """Writes the query encoder, with the name of the documents' encoder, and the module that scores lists."""
        self.query_encoder.save(folder)
        if self._list_scorer is not None:
            save_list_scorer(self._list_scorer, folder)


def fit_to_documents(encoder: TextEncoder, vectors: StoredVectors, *, other_encoder: bool) -> None:
    """Makes ``encoder`` one of queries alone, for these documents; its export says so.

    Raises ``UserError`` for one that neither made them nor was trained for them before, unless it may be
    ``other_encoder``, and for one of another dimension.
    """
    documents, own = vectors.contract, encoder.contract
    if own.document_model != documents.fingerprint:
        mine, theirs = (contract.model_dump(exclude={"revision", "dtype"}) for contract in (own, documents))
        differing = [f"{key} {mine[key]!r} against {theirs[key]!r}" for key in mine if mine[key] != theirs[key]]
        if differing and not other_encoder:
            raise UserError(
                f"The encoder to train is not the one behind the documents' vectors {vectors.uri}:"
                f" {'; '.join(differing)}. Embed the documents with it, train the one that embedded them, or set"
                " objective.other_encoder to true."
            )
    if encoder.dimension != documents.dimension:
        raise UserError(
            f"The encoder gives vectors of {encoder.dimension} dimensions, but the documents' {vectors.uri} have"
            f" {documents.dimension}. Choose an encoder of that dimension."
        )
    encoder.contract = own.model_copy(update={"document_model": documents.fingerprint})


def _mean(counts: Sequence[int]) -> float:
    return float(np.mean(counts)) if counts else 0.0
