"""Contextual training: the masked contrastive loss of vectors that were read in a context drawn from their own batch.

Morris & Rush 2024, "Contextual Document Embeddings". Both stages are encoded in chunks. A gradient passes the second
stage's chunks, is gathered in the context's vectors, and goes on through the chunks of the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import pyarrow as pa
import torch
from torch import Tensor, nn

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.reports.log import log
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import contextual_from
from retrieval.encoders.contextual.second_stage import Prefix
from retrieval.encoders.modules import is_contextual
from retrieval.encoders.pretrained import LocatedModels
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.towers import Towers
from trainers.engine.draws import next_random, text_keys
from trainers.engine.gradient_cache import Chunks, encode_chunks
from trainers.engine.sharding import equal_passes, is_sharded
from trainers.objective import Outcome
from trainers.objectives.contrastive import contrast
from trainers.objectives.pair_settings import ContextualSettings
from trainers.objectives.pairs import Candidates, PairBatch, PairObjective, positives_in_step, texts_of
from trainers.objectives.settings import Run

_FIRST_STAGE = "objective.first_stage"  # among a run's settings
_MOST_OF_A_BATCH = 0.5  # as context, beyond which most pairs lack a document that others have


_KEY = "key"  # beside a text's tokens


def drawn_places(numbers: Tensor, count: int) -> Tensor:
    """A draw without replacement: the places of the ``count`` smallest of ``numbers`` (n,), ascending, int64.

    Of equal numbers (equal texts) the first counts alone; where there are fewer, all are drawn.
    """
    ordered, order = torch.sort(numbers, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first][:count].sort().values


def dropped_places(texts: Tensor, slots: Tensor, probability: float) -> Tensor:
    """Sequence dropout: which of the vectors ``slots`` (J,) each text (n,) goes without, bool (n, J), by their keys.

    One random number for every text and slot, so a chunk that is encoded again reads the same.
    """
    numbers = next_random(texts[:, None] ^ next_random(slots))
    return (numbers >> 11 & (1 << 53) - 1).double() < probability * 2**53


def contextual_encoder(
    encoder: TextEncoder, settings: ContextualSettings, first_stage: TextEncoder | None, seed: int
) -> ContextualEncoder:
    """The encoder to train: an existing contextual one, or a new one with ``encoder`` as its second stage.

    ``seed``: of new weights. Raises ``UserError`` if the settings ask for another form or first stage than the encoder
    has.
    """
    if not isinstance(encoder, ContextualEncoder):
        return contextual_from(
            encoder,
            settings.form(),
            first_stage,
            first_stage_layers=settings.first_stage_layers,
            first_stage_perceptron=settings.variant == "released",
            context_max_length=settings.context_max_length,
            seed=seed,
        )
    form = settings.form()
    own = encoder.contextual_form.model_copy(update={"context_documents": form.context_documents})
    if first_stage is not None or settings.first_stage_layers is not None or own != form:
        raise UserError(
            f"The encoder is contextual already ({own}) and keeps both its stages, but the objective asks for"
            f" '{form}'{', a first stage or a number of its layers' if own == form else ''}. Leave out first_stage"
            " and first_stage_layers, and set variant, vectors_per_document and prefix_attends as in its training."
        )
    encoder.resize_context(own, settings.context_max_length)
    return encoder


@dataclass(frozen=True)
class ContextCandidates:
    """The documents of this rank that may be drawn: int64 (m,) random ``draws`` and text keys; tokens, and chunks."""

    features: dict[str, Tensor]
    draws: Tensor
    keys: Tensor
    chunks: Chunks
    tokens: int


@dataclass(frozen=True)
class ContextualBatch(PairBatch):
    """A batch of pairs with candidates for its context; chunks carry the key of each text beside its tokens."""

    candidates: ContextCandidates


@dataclass(frozen=True)
class _Context:
    """The context of one loss: vectors (J, width), the keys of their texts, and random numbers, int64 (J,).

    ``tokens``: those of the documents in it that this rank read.
    """

    vectors: Tensor
    keys: Tensor
    draws: Tensor
    tokens: int


class Contextual(PairObjective[ContextualSettings]):
    """Trains both stages of a contextual encoder, which queries and documents share."""

    columns: tuple[str, ...] = (*PairObjective.columns, "epoch")
    similarity = "cosine"

    @classmethod
    def prepare(cls, settings: ContextualSettings, towers: Towers, run: Run, models: LocatedModels) -> Towers:
        """The encoder as the second stage of a contextual one."""
        first = None
        if settings.first_stage is not None:
            found = models[_FIRST_STAGE]
            if is_contextual(found.path):
                raise UserError(
                    f"{_FIRST_STAGE} is {settings.first_stage.model}, which is a contextual encoder with two"
                    " stages of its own. Name a plain encoder, or train that contextual encoder itself (encoder)."
                )
            first = load_encoder(settings.first_stage, found.path, found.fingerprint, run.dropout)
        encoder = contextual_encoder(towers.query, settings, first, run.training.seed)
        encoder.require_room(encoder.contextual_form.vectors, encoder.contract.max_length)  # as it is in use
        return Towers(encoder, encoder)

    @classmethod
    def build(cls, settings: ContextualSettings, towers: Towers, *_: Any) -> Self:
        """Around the encoder that ``prepare`` made."""
        if not isinstance(towers.query, ContextualEncoder):
            raise UserError(
                "The objective contextual trains an encoder of two stages, but this one has one. Make it"
                " contextual first (contextual_encoder). A training run does so by itself."
            )
        return cls(towers.query, settings)

    @property
    def contextual(self) -> ContextualEncoder:
        """The encoder."""
        return cast(ContextualEncoder, self.query_encoder)

    @property
    def corpus_sample(self) -> int:
        """A context's documents."""
        return self.settings.context_documents

    def check_batches(self, batches: BatchReader) -> None:
        """Says, too, where most pairs would be marked by what is missing from their context."""
        super().check_batches(batches)
        settings, rows = self.settings, batches.batch_size
        whole = self.joins_step  # a context is then drawn from more rows than a batch has
        if whole or settings.own_documents_in_context or settings.context_documents <= rows * _MOST_OF_A_BATCH:
            return
        log.info(
            f"  objective.context_documents is {settings.context_documents} with batches of {rows}, and a pair's"
            " own document is left out of its context. Most pairs can then be identified by the missing document,"
            f" which lowers the loss but doesn't improve the ranking. Set context_documents to {max(rows // 4, 1)}"
            " or fewer, or own_documents_in_context to true."
        )

    def read_corpus(self, documents: Sequence[str]) -> None:
        """Makes ``documents`` the context of what is embedded from now on."""
        self.contextual.use_context(self.contextual.embed_context(documents))

    def export(self, folder: Path) -> None:
        """Writes both stages; the context that validation read is no part of them."""
        self.contextual.forget_context()
        super().export(folder)

    def collate(self, rows: pa.Table) -> ContextualBatch:
        """Tokenises each distinct text once, and once more those that may be drawn as context.

        ``tokens`` are those of the pairs: which candidates are drawn, and so encoded, the ranks find out together.
        """
        pairs = super().collate(rows)
        return ContextualBatch(**vars(pairs), candidates=self._candidates(rows, rows["epoch"][0].as_py()))

    def tokenize(self, texts: Sequence[str], prompts: Sequence[str | None], role: Role) -> dict[str, Tensor]:
        """As for all pairs, with the key of each text."""
        return super().tokenize(texts, prompts, role) | {_KEY: text_keys(texts)[:, None]}

    def _candidates(self, rows: pa.Table, epoch: int) -> ContextCandidates:
        """This rank's documents that are drawn if no other rank has a smaller number.

        A text that two domains read behind different prompts may be drawn once for each.
        """
        _, documents = texts_of(rows)
        pairs = dict.fromkeys(zip(self.prompts(rows)[1], documents, strict=True))
        distinct = [(prompt, text) for prompt, text in pairs if text.strip()]
        keyed = [text if prompt is None else prompt + text for prompt, text in distinct]
        numbers = text_keys(keyed, salt=f"{self.settings.seed} {epoch} ")
        places = drawn_places(numbers, self.settings.context_documents)
        prompts, texts = zip(*(distinct[place] for place in places.tolist()), strict=True) if len(places) else ((), ())
        none = torch.zeros(0, 1, dtype=torch.int64)
        features = {"input_ids": none, "attention_mask": none}
        if texts:
            features = self.contextual.first_stage.tokenize(texts, "document", prompts=prompts)
        return ContextCandidates(features, numbers[places], text_keys(texts), *self._cut_context(features))

    def _cut_context(self, features: dict[str, Tensor]) -> tuple[Chunks, int]:
        """Chunks for the first stage, and their tokens. Documents with vectors that nothing reads are in no chunk."""
        if len(features["input_ids"]):
            return self.settings.cut(features, self.contextual), int(features["attention_mask"].sum())
        one = features["input_ids"].new_ones(1, 1)
        return Chunks((dict.fromkeys(features, one),), one[0, :0]), 0

    def forward(self, batch: PairBatch) -> Outcome:
        """The loss over this rank's queries and the documents of all ranks that share it."""
        batch = cast(ContextualBatch, batch)  # as ``collate`` makes it
        context = self._read_context(batch.candidates)
        rows = self.gather(torch.stack([batch.query_keys, batch.text_keys[: len(batch)]], dim=1))
        answers, count = torch.cat([rows[:, 1], context.keys]), len(rows)
        prefix = self.contextual.read_context(context.vectors, droppable=self._dropout > 0)
        own_answers = _by_key(batch.query_keys, positives_in_step(batch.query_keys, rows[:, 0], answers)[:, count:])
        queries = self._encode(cast(Chunks, batch.queries), context, prefix, own_answers)
        documents = self._encode(batch.documents, context, prefix, lambda keys: keys[:, None] == context.keys)
        outcome = self.compare(batch, queries, documents)
        in_context = (batch.text_keys[: len(batch)][:, None] == context.keys).any(dim=1)
        metrics = outcome.metrics | {"answers_in_context": in_context.float().mean()}
        return replace(outcome, metrics=metrics, tokens=batch.tokens + context.tokens)

    def loss(self, queries: Tensor, documents: Tensor, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """``masked_contrastive_loss`` of normalised vectors."""
        queries, documents = (nn.functional.normalize(vectors, dim=-1) for vectors in (queries, documents))
        return contrast(queries, documents, candidates, self.settings.similarity_temperature)

    def _read_context(self, candidates: ContextCandidates) -> _Context:
        """Each rank embeds those that are drawn of its own documents, and all get the vectors of all."""
        candidates, counts = self._draw_together(candidates) if self.batch_group is not None else (candidates, None)
        vectors = self._read_own(candidates.chunks)
        numbers = torch.arange(self.settings.vectors_per_document, device=vectors.device)
        return _Context(
            vectors=self.gather(vectors, counts).flatten(0, 1),
            keys=candidates.keys.repeat_interleave(len(numbers)),
            draws=(candidates.draws[:, None] + numbers).flatten(),
            tokens=candidates.tokens,
        )

    def _draw_together(self, own: ContextCandidates) -> tuple[ContextCandidates, list[int]]:
        """The draw from all ranks' candidates, with only this rank's tokens, and how many each rank has of it."""
        counts, device = self.counts_of_slices(len(own.draws)), own.draws.device
        table = self.gather(torch.stack([own.draws, own.keys], dim=1), counts).cpu()
        places = drawn_places(table[:, 0], self.settings.context_documents)
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[places]
        mine = places[owners == self.slice_number] - sum(counts[: self.slice_number])
        draws, keys = table[places].to(device).unbind(dim=1)
        features = {name: of[mine.to(device)] for name, of in own.features.items()}
        chunks, tokens = self._cut_context(features)
        chunks = equal_passes(chunks, device) if is_sharded(self) else chunks
        numbers = torch.bincount(owners, minlength=len(counts)).tolist()
        return ContextCandidates(features, draws, keys, chunks, tokens), numbers

    def _read_own(self, chunks: Chunks) -> Tensor:
        """Vectors (n, k, width) of this rank's documents in the context; of none too: a gather has a backward pass."""
        settings, null = self.settings, self.contextual.null
        if not len(chunks.order) and not is_sharded(self):  # ranks that share weights make the same number of passes
            shape = (0, settings.vectors_per_document, len(null))
            return null.new_zeros(shape, requires_grad=torch.is_grad_enabled())
        return encode_chunks(self.contextual.read_documents, chunks, cached=settings.gradient_cache)

    @property
    def _dropout(self) -> float:
        return self.settings.sequence_dropout if self.training else 0.0

    def _encode(self, texts: Chunks, context: _Context, prefix: Prefix, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Vectors; ``own`` says which context vectors are those of a text's own document, by its key."""
        settings, dropout = self.settings, self._dropout

        def encode(features: Mapping[str, Tensor]) -> Tensor:
            keys = features[_KEY][:, 0]
            hidden = None if settings.own_documents_in_context else own(keys)
            dropped = dropped_places(keys, context.draws, dropout) if dropout else None
            return self.contextual.encode(features, prefix, dropped, hidden)

        return encode_chunks(encode, texts, cached=settings.gradient_cache)


def _by_key(keys: Tensor, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Looks up ``rows`` (n, …) by ``keys`` int64 (n,): rows of one key are equal, and only these keys are asked for."""
    ordered, order = keys.sort()
    table = rows[order]
    return lambda asked: table[torch.searchsorted(ordered, asked)]
