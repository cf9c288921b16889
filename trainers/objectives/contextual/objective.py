"""Contextual training: the masked contrastive loss of vectors that were read in a context drawn from their own batch.

Morris & Rush 2024, "Contextual Document Embeddings". Both stages are encoded in chunks: a gradient passes the second
stage's chunks, gathers in the context's vectors, and goes on through the chunks of the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from raytriever.retrieval.encoders.contextual.encoder import ContextualEncoder
from raytriever.retrieval.encoders.contextual.second_stage import Prefix
from raytriever.retrieval.encoders.specification import Role
from raytriever.retrieval.encoders.text_encoder import TextEncoder
from raytriever.retrieval.errors import UserError
from raytriever.trainers.gradient_cache import Chunks, cut_by_length, encode_chunks
from raytriever.trainers.objective import Outcome
from raytriever.trainers.objectives.contextual.draws import drawn_places, dropped_places, text_keys
from raytriever.trainers.objectives.contextual.settings import ContextualSettings
from raytriever.trainers.objectives.contrastive import contrastive_metrics, masked_contrastive_loss
from raytriever.trainers.objectives.pair_batch import PairBatch, collate_pairs, known_positives
from raytriever.trainers.objectives.pair_objective import PairObjective
from raytriever.trainers.reading import EPOCH
from raytriever.trainers.sharding import equal_passes, is_sharded

_KEY = "key"  # beside a text's tokens


def require_contextual(encoder: TextEncoder) -> ContextualEncoder:
    """``encoder`` as what it is. Raises ``UserError`` where it has one stage alone."""
    if isinstance(encoder, ContextualEncoder):
        return encoder
    raise UserError(
        "The objective contextual trains an encoder of two stages, and this one has one. Make it contextual first"
        " (contextual_encoder); a training run does so."
    )


@dataclass(frozen=True)
class ContextCandidates:
    """The documents of this rank that may be drawn: tokens (m, length), int64 (m,) random ``draws`` and text keys."""

    features: dict[str, Tensor]
    draws: Tensor
    keys: Tensor


@dataclass(frozen=True)
class ContextualBatch(PairBatch):
    """A batch of pairs with candidates for its context; ``query_keys``, ``document_keys`` int64 (n,) are of its rows.

    Chunks carry the key of each text beside its tokens.
    """

    candidates: ContextCandidates
    query_keys: Tensor
    document_keys: Tensor


@dataclass(frozen=True)
class _Context:
    """The context of one loss: vectors (J, width), the keys of their texts, and random numbers, int64 (J,).

    ``tokens``: those of the documents in it that this rank read.
    """

    vectors: Tensor
    keys: Tensor
    draws: Tensor
    tokens: int


class Contextual(PairObjective):
    """Trains both stages of a contextual encoder, which queries and documents share."""

    columns: ClassVar[tuple[str, ...]] = (*PairObjective.columns, EPOCH)

    def __init__(self, encoder: ContextualEncoder, settings: ContextualSettings) -> None:
        super().__init__(encoder, encoder, settings)
        self.settings = settings
        self.similarity = "cosine"

    @property
    def contextual(self) -> ContextualEncoder:
        """The encoder."""
        return cast(ContextualEncoder, self.query_encoder)

    @property
    def corpus_sample(self) -> int:
        """A context's documents."""
        return self.settings.context_documents

    def read_corpus(self, documents: Sequence[str]) -> None:
        """Makes ``documents`` the context of what is embedded from now on."""
        self.contextual.use_context(self.contextual.embed_context(documents))

    def export(self, folder: Path) -> None:
        """Writes both stages; the context that validation read is no part of them."""
        self.contextual.forget_context()
        super().export(folder)

    def collate(self, rows: pa.Table, first_row: int = 0) -> ContextualBatch:
        """Tokenises each distinct text once, and once more those that may be drawn as context.

        ``tokens`` are those of the pairs: which candidates are drawn, and so encoded, the ranks find out together.
        """
        settings = self.settings
        pairs = collate_pairs(
            rows,
            partial(self._tokenize, role="query", max_length=settings.query_max_length),
            partial(self._tokenize, role="document", max_length=settings.document_max_length),
            settings.chunk_size,
            joined=self.joins_step,
            first_row=first_row,
        )
        documents = rows["document"].to_pylist()
        candidates = self._candidates(
            documents + pc.list_flatten(rows["hard_negatives"]).to_pylist(), rows[EPOCH][0].as_py()
        )
        return ContextualBatch(
            **vars(pairs),
            candidates=candidates,
            query_keys=text_keys(rows["query"].to_pylist()),
            document_keys=text_keys(documents),
        )

    def _tokenize(self, texts: Sequence[str], role: Role, max_length: int | None) -> dict[str, Tensor]:
        return self.contextual.tokenize(texts, role, max_length) | {_KEY: text_keys(texts)[:, None]}

    def _candidates(self, documents: Sequence[str], epoch: int) -> ContextCandidates:
        """Those of this rank's documents that are drawn where no other rank has a smaller number."""
        distinct = [text for text in dict.fromkeys(documents) if text.strip()]
        numbers = text_keys(distinct, salt=f"{self.settings.seed} {epoch} ")
        places = drawn_places(numbers, self.settings.context_documents)
        texts = [distinct[place] for place in places.tolist()]
        none = torch.zeros(0, 1, dtype=torch.int64)
        features = {"input_ids": none, "attention_mask": none}
        if texts:
            features = self.contextual.first_stage.tokenize(texts, "document")
        return ContextCandidates(features, numbers[places], text_keys(texts))

    def forward(self, batch: PairBatch) -> Outcome:
        """The loss over this rank's queries and the documents of all ranks that share it."""
        batch = cast(ContextualBatch, batch)  # as ``collate`` makes it
        columns = self.count_columns(batch)
        context = self._read_context(batch.candidates)
        rows = self.gather(torch.stack([batch.query_keys, batch.document_keys], dim=1))
        answers, count = torch.cat([rows[:, 1], context.keys]), len(rows)
        prefix = self.contextual.read_context(context.vectors, droppable=self._dropout > 0)
        own_answers = _by_key(batch.query_keys, known_positives(batch.query_keys, rows[:, 0], answers)[:, count:])
        query_vectors = self._encode(batch.queries, context, prefix, own_answers)
        own_vectors = self._encode(batch.documents, context, prefix, lambda keys: keys[:, None] == context.keys)
        document_vectors = self.gather_columns(own_vectors, columns)
        mask, positives, temperature = columns.mask, columns.positives, self.settings.similarity_temperature
        loss = masked_contrastive_loss(query_vectors, document_vectors, mask, positives, temperature)
        metrics = contrastive_metrics(query_vectors, document_vectors, mask, positives)
        in_context = (batch.document_keys[:, None] == context.keys).any(dim=1)
        metrics["answers_in_context"] = in_context.float().mean()
        return Outcome(loss, metrics, len(query_vectors), batch.tokens + context.tokens)

    def _read_context(self, candidates: ContextCandidates) -> _Context:
        """Each rank embeds those that are drawn of its own documents, and all get the vectors of all."""
        settings, mine = self.settings, self.slice_number
        keys, draws = candidates.keys, candidates.draws
        table = self.gather(torch.stack([draws, keys, torch.full_like(keys, mine)], dim=1))
        drawn = drawn_places(table[:, 0], settings.context_documents)
        own = drawn[table[drawn, 2] == mine] - (table[:, 2] < mine).sum()
        features = {name: of[own] for name, of in candidates.features.items()}
        vectors = self._read_own(features)
        numbers = torch.arange(settings.vectors_per_document, device=drawn.device)
        return _Context(
            vectors=self.gather(vectors).flatten(0, 1),
            keys=table[drawn, 1].repeat_interleave(len(numbers)),
            draws=(table[drawn, 0, None] + numbers).flatten(),
            tokens=int(features["attention_mask"].sum()),
        )

    def _read_own(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors (n, k, width) of this rank's documents in the context; of none too: a gather has a backward pass."""
        settings, null, device = self.settings, self.contextual.null, features["input_ids"].device
        count, is_shared_out = len(features["input_ids"]), is_sharded(self)
        if not count and not is_shared_out:
            shape = (0, settings.vectors_per_document, len(null))
            return torch.zeros(shape, dtype=null.dtype, device=device, requires_grad=torch.is_grad_enabled())
        if not count:  # all ranks make as many passes, though nothing reads the vectors of some
            features = {name: torch.ones(1, 1, dtype=torch.int64, device=device) for name in features}
        chunks = cut_by_length(features, settings.chunk_size, torch.arange(count, device=device))
        if is_shared_out:
            chunks = equal_passes(chunks, device)
        return encode_chunks(self.contextual.read_documents, chunks, cached=settings.gradient_cache)

    @property
    def _dropout(self) -> float:
        return self.settings.sequence_dropout if self.training else 0.0

    def _encode(self, texts: Chunks, context: _Context, prefix: Prefix, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Normalised vectors; ``own`` says which context vectors are those of a text's own document, by its key."""
        settings, dropout = self.settings, self._dropout

        def encode(features: Mapping[str, Tensor]) -> Tensor:
            keys = features[_KEY][:, 0]
            hidden = None if settings.own_documents_in_context else own(keys)
            dropped = dropped_places(keys, context.draws, dropout) if dropout else None
            return self.contextual.encode(features, prefix, dropped, hidden)

        return nn.functional.normalize(encode_chunks(encode, texts, cached=settings.gradient_cache), dim=-1)


def _by_key(keys: Tensor, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Looks up ``rows`` (n, …) by ``keys`` int64 (n,): rows of one key are equal, and only these keys are asked for."""
    distinct, place = torch.unique(keys, return_inverse=True)
    any_row = torch.empty_like(distinct)
    any_row[place] = torch.arange(len(keys), device=keys.device)
    table = rows[any_row]
    return lambda asked: table[torch.searchsorted(distinct, asked)]
