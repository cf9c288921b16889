"""Multi-layer representations: documents with a vector for each of several layers, and their reduction to one.

Xie & Lukasiewicz 2025, "Investigating Multi-layer Representations for Dense Passage Retrieval". Equations cited below
are theirs. The same switch offers what they compare it with: vectors of tokens (ME-BERT, ColBERT with one query
vector), average and scalar mix, and the plain dual encoder. Nothing is detached.
"""

from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from retrieval.encoders.multi_vector import MultiVectorEncoder
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.towers import Towers
from trainers.engine.gradient_cache import Chunks, encode_chunks, encode_several, pad_vectors
from trainers.objectives.contrastive import batch_metrics, contrast
from trainers.objectives.pair_settings import MultiLayerSettings
from trainers.objectives.pairs import Candidates, PairBatch, PairObjective

Reduced = Literal[0, -1]
"""Place of the vector that stands for a document alone: -1 the last layer's, 0 the first token's."""


def vector_similarities(query_vectors: Tensor, document_vectors: Tensor, present: Tensor) -> Tensor:
    """Inner products h_q^T h of n queries with every vector of M documents: (n, M, m), -inf where there is none.

    ``query_vectors`` (n, d), ``document_vectors`` (M, m, d), ``present`` bool (M, m). In float32 (float64 for float64
    vectors) whatever autocast says.
    """
    with torch.autocast(query_vectors.device.type, enabled=False):
        flat = at_least_float32(document_vectors).flatten(0, 1)
        similarities = at_least_float32(query_vectors) @ flat.T
        return similarities.view(len(query_vectors), *present.shape).masked_fill(~present, -torch.inf)


def best_vector(similarities: Tensor, reduced: Reduced) -> Tensor:
    """Which of m vectors is most similar: int64 (…) from (…, m). Of equal ones the nearest to ``reduced``."""
    similarities = similarities.detach()
    number = similarities.shape[-1]
    preference = torch.arange(1, number + 1, device=similarities.device)
    if reduced == 0:
        preference = preference.flip(0)
    best = similarities == similarities.amax(dim=-1, keepdim=True)
    return (best * preference).argmax(dim=-1)


def max_similarity(similarities: Tensor, reduced: Reduced) -> Tensor:
    """Eq. 2: the similarity of a document is that of its best vector, (…) from (…, m); only that has a gradient."""
    return similarities.gather(-1, best_vector(similarities, reduced).unsqueeze(-1)).squeeze(-1)


def multi_vector_loss(similarities: Tensor, mask: Tensor, positives: Tensor, reduced: Reduced) -> Tensor:
    """Eq. 3 of each query, (n,): every document by its best vector.

    ``similarities`` (n, M, m), temperature applied; ``mask`` bool (n, M), True is left out, never a query's own
    positive; ``positives`` int64 (n,), each query's column. The same for the losses below.
    """
    return _cross_entropy(max_similarity(similarities, reduced), mask, positives)


def self_contrastive_loss(similarities: Tensor, mask: Tensor, positives: Tensor, reduced: Reduced) -> Tensor:
    """Eq. 5 of each query, (n,): its positive by the ``reduced`` vector, every other document by its best.

    A document that is the positive of one query is judged by its best vector for all other queries.
    """
    own = positive_similarities(similarities, positives)[:, reduced]
    scores = max_similarity(similarities, reduced).scatter(1, positives.unsqueeze(1), own.unsqueeze(1))
    return _cross_entropy(scores, mask, positives)


def reduced_vector_loss(similarities: Tensor, mask: Tensor, positives: Tensor, reduced: Reduced) -> Tensor:
    """The dual encoder's loss of each query, (n,): every document by the ``reduced`` vector."""
    return _cross_entropy(similarities[:, :, reduced], mask, positives)


def self_contrastive_regulariser(similarities: Tensor, positives: Tensor, reduced: Reduced) -> Tensor:
    """Eq. 6 of each query, (n,): the ``reduced`` vector of its positive against all vectors of it."""
    own = positive_similarities(similarities, positives)
    return own.logsumexp(dim=1) - own[:, reduced]


def positive_similarities(similarities: Tensor, positives: Tensor) -> Tensor:
    """Similarities of each query with the vectors of its positive, (n, m) from (n, M, m)."""
    return similarities[torch.arange(len(positives), device=positives.device), positives]


def _cross_entropy(scores: Tensor, mask: Tensor, positives: Tensor) -> Tensor:
    return functional.cross_entropy(scores.masked_fill(mask, -torch.inf), positives, reduction="none")


class MultiLayer(PairObjective[MultiLayerSettings]):
    """Trains a query encoder of one vector and a document encoder of several; they may share their weights.

    Negatives of a query are all other documents and hard negatives of its batch, except those in ``masked``. With one
    hard negative a row these are 2 (B - 1) + 1. Raises ``UserError`` where the document encoder's form is not what is
    trained.
    """

    def __init__(self, query_encoder: TextEncoder, document_encoder: TextEncoder, settings: MultiLayerSettings) -> None:
        settings.require_form(document_encoder.form)
        super().__init__(query_encoder, settings, document_encoder)
        self._form = document_encoder.form
        self._reduced: Reduced = -1 if self._form.kind == "layers" else 0
        self._one_vector = settings.training_form in ("average", "scalar_mix", "dual_encoder")

    @classmethod
    def build(cls, settings: MultiLayerSettings, towers: Towers, *_: Any) -> Self:
        """Around both encoders; that of documents is a plain one where they have a single vector."""
        return cls(towers.query, towers.document, settings)

    def encode(self, batch: PairBatch) -> tuple[Tensor, Any]:
        """As for all pairs. If a document has several vectors: (n + h, m, d), and which of them exist (n + h, m)."""
        if self._one_vector:
            return super().encode(batch)
        cached = self.settings.gradient_cache
        queries = encode_chunks(self.query_encoder, cast(Chunks, batch.queries), cached=cached)
        encoder = cast(MultiVectorEncoder, self.document_encoder)
        return queries, encode_several(encoder.states, batch.documents, cached=cached)

    def gather_documents(self, documents: Any, candidates: Candidates) -> Any:
        """As for all pairs. Several vectors are padded to the most of any rank."""
        if self._one_vector or self.batch_group is None:
            return super().gather_documents(documents, candidates)
        vectors, present = documents
        most = max(self.counts_of_slices(vectors.shape[1]))
        vectors, present = pad_vectors(vectors, present, most)
        gather = super().gather_documents
        return gather(vectors, candidates), gather(present.byte(), candidates).bool()

    def loss(self, queries: Tensor, documents: Any, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """That of the training form."""
        settings, mask, positives, reduced = self.settings, candidates.mask, candidates.positives, self._reduced
        if self._one_vector:
            return contrast(queries, documents, candidates, settings.similarity_temperature)
        similarities = vector_similarities(queries, *documents)
        scaled = similarities / settings.similarity_temperature
        if settings.training_form == "multi_vector":
            losses = multi_vector_loss(scaled, mask, positives, reduced)
        elif settings.training_form == "self_contrastive":
            losses = self_contrastive_loss(scaled, mask, positives, reduced)
        else:
            losses = reduced_vector_loss(scaled, mask, positives, reduced)
        if settings.regularisation:
            regulariser = self_contrastive_regulariser(scaled, positives, reduced)
            losses = losses + settings.regularisation * regulariser  # Eq. 7
        return losses.mean(), self._metrics(similarities, candidates)

    @torch.no_grad()
    def _metrics(self, similarities: Tensor, candidates: Candidates) -> dict[str, Tensor]:
        """Metrics of the similarities that a search would see, and the share of positives that each vector won."""
        winner = best_vector(positive_similarities(similarities, candidates.positives), self._reduced)
        if self._form.kind == "layers":
            shares = {f"won_by_layer_{layer}": winner == place for place, layer in enumerate(self._form.layers)}
        else:
            shares = {"won_by_first_token": winner == 0}
        searched = similarities[:, :, self._reduced]
        if not self._form.reduced:
            searched = max_similarity(similarities, self._reduced)
        metrics = batch_metrics(lambda rows: searched[rows], candidates.mask, candidates.positives)
        return metrics | {name: won.float().mean() for name, won in shares.items()}
