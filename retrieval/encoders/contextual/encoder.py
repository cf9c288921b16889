"""A contextual encoder: a first stage embeds documents of the corpus, a second stage reads a text behind their vectors.

Morris & Rush 2024, "Contextual Document Embeddings".
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raytriever.retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, token_budget_batches
from raytriever.retrieval.encoders.contextual.families import backbone_of
from raytriever.retrieval.encoders.contextual.form import ContextualForm
from raytriever.retrieval.encoders.contextual.second_stage import Prefix, read_prefix, read_texts, unplaced
from raytriever.retrieval.encoders.specification import EncoderContract
from raytriever.retrieval.encoders.text_encoder import TextEncoder, pool
from raytriever.retrieval.errors import UserError

Context = Tensor | Literal["null"] | None
"""Vectors (J, width) of a first stage; the null vector in the place of all of them; or nothing before a text."""

_NULL_DEVIATION = 0.02  # of fresh vectors, where the model's configuration names none


class ContextualEncoder(TextEncoder):
    """Texts to vectors, given a context.

    ``transformer`` is the second stage's; ``first_stage`` has weights of its own, its dense layers are applied to each
    vector, its normalisation isn't. Queries and documents share both stages and a context. ``forward``, and all that
    calls the encoder with tokens, reads texts in the context that ``use_context`` set; training gives it to
    ``read_context`` and ``encode``. A context's order means nothing.

    Raises ``UserError`` for a family without a way in for vectors, and for stages of different width.
    """

    def __init__(
        self,
        transformer: nn.Module,
        tokenizer: Any,
        dense: Sequence[nn.Module],
        contract: EncoderContract,
        first_stage: TextEncoder,
        form: ContextualForm,
        fresh_seed: int = 0,
    ) -> None:
        super().__init__(
            transformer, tokenizer, dense, contract.model_copy(update={"architecture": str(form), "context": None})
        )
        config: Any = transformer.config
        width = int(config.hidden_size)
        if first_stage.dimension != width:
            raise UserError(
                f"The first stage's vectors have {first_stage.dimension} numbers, but the encoder's tokens {width}, in"
                " whose place they stand. Choose a first stage of the same width."
            )
        self.first_stage = first_stage
        self.contextual_form = form
        self._backbone = backbone_of(transformer)
        generator = torch.Generator().manual_seed(fresh_seed)
        deviation = getattr(config, "initializer_range", _NULL_DEVIATION)
        self.null = nn.Parameter(torch.randn(width, generator=generator) * deviation)
        self.prompts = perceptron(width, form.prompts * width, nn.ReLU(), generator) if form.prompts else None
        self.head = perceptron(width, width, nn.ReLU(), generator) if form.residual_head else None
        self.context_vectors: Tensor | None
        self.register_buffer("context_vectors", None, persistent=False)
        self._mode: Literal["unset", "vectors", "null", "none"] = "unset"
        self._prefix: Prefix | None = None  # of the context in use, while weights stay as they are

    def resize_context(self, form: ContextualForm, context_max_length: int | None) -> None:
        """Sets how many documents a context has, in which alone ``form`` differs, and how many tokens of each count.

        None leaves the first stage's length. Raises ``UserError`` for more tokens than it has.
        """
        self.contextual_form = form
        self.contract = self.contract.model_copy(update={"architecture": str(form)})
        if context_max_length is not None:
            self.first_stage.contract = shortened(self.first_stage.contract, context_max_length)

    def read_documents(self, features: Mapping[str, Tensor]) -> Tensor:
        """The first stage: (n, k, width) from what its ``tokenize`` returns, differentiable."""
        states = self.first_stage.transformer(**features).last_hidden_state
        mask, count = features["attention_mask"], self.contextual_form.vectors_per_document
        if count == 1:
            vectors = pool(states, mask, self.first_stage.contract.pooling)[:, None]
        else:
            vectors = segment_means(states, mask, count)
        for layer in self.first_stage.dense:
            vectors = layer(vectors)
        return vectors

    @torch.no_grad()
    def embed_context(self, texts: Sequence[str], *, token_budget: int | None = None) -> Tensor:
        """The first stage's vectors of documents, (documents * k, width), on the encoder's device, for ``use_context``.

        ``token_budget``: padded tokens in one forward pass. Raises ``UserError`` where a document is empty.
        """
        empty = [place for place, text in enumerate(texts) if not text.strip()]
        if empty:
            raise UserError(
                f"{len(empty)} of the {len(texts)} documents for the context are empty, the first at place {empty[0]}:"
                " they say nothing of the corpus. Leave them out, and draw others in their place."
            )
        device = self.null.device
        ids = self.first_stage.tokenize_ids(texts, "document")
        budget = token_budget or (TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_GPU)
        vectors = self.null.new_empty(len(texts), self.contextual_form.vectors_per_document, len(self.null))
        for batch in token_budget_batches([len(row) for row in ids], budget):
            features = self.first_stage.pad([ids[place] for place in batch])
            found = self.read_documents({name: tensor.to(device) for name, tensor in features.items()})
            vectors[torch.from_numpy(batch).to(device)] = found.to(vectors.dtype)
        return vectors.flatten(0, 1)

    def use_context(self, context: Context, fingerprint: str | None = None) -> None:
        """What ``forward`` reads texts in from now on: vectors, the null vector ('null'), or nothing (None).

        ``fingerprint``: what the contract says of the vectors; None: a hash of their numbers. Raises ``UserError`` for
        vectors of another width.
        """
        self._prefix = None
        if isinstance(context, Tensor):
            if context.ndim != 2 or context.shape[1] != len(self.null) or not len(context):
                raise UserError(
                    f"The context has the shape {tuple(context.shape)}; vectors of this encoder's first stage are"
                    f" (documents, {len(self.null)}), one at least."
                )
            self.context_vectors, self._mode = context.detach().to(self.null.device), "vectors"
            numbers = context.detach().float().cpu().contiguous().numpy().tobytes()
            name = fingerprint or hashlib.sha256(numbers).hexdigest()
        else:
            self.context_vectors, self._mode = None, "none" if context is None else "null"
            name = self._mode
        self.contract = self.contract.model_copy(update={"context": name})

    def forget_context(self) -> None:
        """As it was before any ``use_context``."""
        self._prefix, self._mode, self.context_vectors = None, "unset", None
        self.contract = self.contract.model_copy(update={"context": None})

    def read_context(self, context: Context, *, droppable: bool = False) -> Prefix:
        """What ``encode`` reads texts behind. ``droppable``: single vectors will be replaced by the null vector."""
        form, device, null = self.contextual_form, self.null.device, self.null[None]
        given = context if isinstance(context, Tensor) else null[:0]
        with_null = context == "null" if not isinstance(context, Tensor) else droppable
        vectors, slots = [given.to(null.dtype)], len(given)
        weights = [torch.ones(len(given), device=device)]
        if with_null:
            slots = slots or form.vectors
            vectors.append(null)
            weights.append(torch.full((1,), 0.0 if len(given) else float(slots), device=device))
        positions = [unplaced(len(given) + with_null, device)]
        is_behind = form.text_positions == "behind_prefix"
        if self.prompts is not None:
            vectors.append(self.prompts(torch.ones_like(self.null)).view(form.prompts, -1))
            weights.append(torch.ones(form.prompts, device=device))
            placed = slots + torch.arange(form.prompts, device=device)
            positions.append(placed if is_behind else unplaced(form.prompts, device))
        return read_prefix(
            self._backbone,
            torch.cat(vectors),
            torch.cat(positions),
            torch.cat(weights),
            null_row=len(given) if with_null else None,
            text_start=slots + form.prompts if is_behind else 0,
            attends=form.prefix_attends,
        )

    def encode(
        self,
        features: Mapping[str, Tensor],
        prefix: Prefix,
        dropped: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Vectors (n, dimension) of texts behind what ``read_context`` read, normalised if the contract says so.

        ``dropped`` bool (n, J): where the null vector stands in for a text's context vector (for a ``droppable``
        prefix); ``hidden`` bool (n, J): where there is none, as if the context were smaller.
        """
        mask = features["attention_mask"]
        weights = _weights(prefix, dropped, hidden)
        is_all = self.contextual_form.pooled == "all"
        states = read_texts(self._backbone, prefix, features["input_ids"], mask, weights, prefix_too=is_all)
        if is_all:
            before = prefix.weights.expand(len(mask), -1) if weights is None else weights
            vectors = weighted_mean(states, torch.cat([before, mask.to(before.dtype)], dim=1))
        else:
            vectors = pool(states, mask, self.contract.pooling)
        if self.head is not None:
            vectors = self.head(vectors.to(self.null.dtype)) + vectors  # the sum is in float32 again
        for layer in self.dense:
            vectors = layer(vectors)
        return nn.functional.normalize(vectors, dim=-1) if self.contract.normalize else vectors

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (n, dimension) in float32 in the context in use. Raises ``UserError`` where none was set."""
        if self._mode == "unset":
            raise UserError(
                f"The encoder was trained with a context ({self.contextual_form}) and none is set, so its vectors would"
                " be others than those it was trained for. Give it documents of the corpus that it embeds"
                " (use_context(embed_context(documents))), or say that there is none: use_context('null') puts the null"
                " vector in their place, use_context(None) leaves them out."
            )
        if torch.is_grad_enabled():
            return self.encode(features, self.read_context(self._context()))
        if self._prefix is None:
            self._prefix = self.read_context(self._context())
        return self.encode(features, self._prefix)

    def _context(self) -> Context:
        return self.context_vectors if self._mode == "vectors" else "null" if self._mode == "null" else None

    def train(self, mode: bool = True) -> "ContextualEncoder":
        """Forgets what was computed of the context: weights may have changed since."""
        self._prefix = None
        return super().train(mode)

    def _apply(self, *arguments: Any, **keywords: Any) -> "ContextualEncoder":
        self._prefix = None  # on another device or in another precision
        super()._apply(*arguments, **keywords)  # type: ignore[no-untyped-call]
        return self

    def save(self, folder: Path) -> None:
        """Writes both stages and what joins them; ``load_towers`` reads it.

        sentence-transformers loads it as a plain encoder, the second stage without context: a fallback, whose vectors
        are not those the encoder was trained for.
        """
        from raytriever.retrieval.encoders.contextual.folder import write_contextual

        write_contextual(self, folder)


def shortened(contract: EncoderContract, max_length: int) -> EncoderContract:
    """The first stage's contract with documents cut at ``max_length`` tokens. Raises ``UserError`` for more."""
    if max_length > contract.max_length:
        raise UserError(
            f"context_max_length is {max_length}, over the first stage's limit of {contract.max_length} tokens. Lower"
            " it, or raise the max_length of the encoder that the first stage is made from."
        )
    return contract.model_copy(update={"max_length": max_length})


def perceptron(width: int, to: int, activation: nn.Module, generator: torch.Generator) -> nn.Sequential:
    """Two linear layers from ``width`` over ``width`` to ``to`` features, with fresh weights and no bias at first."""
    inner, outer = nn.Linear(width, width), nn.Linear(width, to)
    with torch.no_grad():
        for linear in (inner, outer):
            linear.weight.normal_(0.0, width**-0.5, generator=generator)
            linear.bias.zero_()
    return nn.Sequential(inner, activation, outer)


def segment_means(states: Tensor, attention_mask: Tensor, count: int) -> Tensor:
    """Means of ``count`` segments of each text, consecutive and of about equal length: (n, count, width) in float32.

    ``states`` (n, T, width), ``attention_mask`` (n, T). A text of fewer tokens has equal segments of one token.
    """
    lengths, places = attention_mask.sum(dim=1)[:, None, None], torch.arange(states.shape[1], device=states.device)
    numbers = torch.arange(count, device=states.device)[:, None]
    first = numbers * lengths // count
    behind = torch.maximum((numbers + 1) * lengths // count, first + 1)
    inside = ((places >= first) & (places < behind)).to(torch.promote_types(states.dtype, torch.float32))
    kept = states.to(inside.dtype).masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)
    with torch.autocast(states.device.type, enabled=False):
        return inside @ kept / inside.sum(dim=-1, keepdim=True)


def weighted_mean(states: Tensor, weights: Tensor) -> Tensor:
    """(n, width) in float32 from states (n, rows, width), each row counted ``weights`` (n, rows) times."""
    weights = weights.to(torch.promote_types(states.dtype, torch.float32)).unsqueeze(-1)
    kept = states.to(weights.dtype).masked_fill(weights == 0, 0.0)
    return (kept * weights).sum(dim=1) / weights.sum(dim=1)


def _weights(prefix: Prefix, dropped: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """(n, P): how many equal vectors each row of the prefix stands for, text by text; None: as the prefix says."""
    given = dropped if hidden is None else hidden
    if given is None:
        return None
    count = given.shape[1]
    away = given if dropped is None or hidden is None else dropped | hidden
    weights = prefix.weights.expand(len(given), -1).clone()
    weights[:, :count] = (~away).to(weights.dtype)
    if dropped is not None and prefix.null_row is not None:
        nulls = dropped if hidden is None else dropped & ~hidden
        weights[:, prefix.null_row] = nulls.sum(dim=1).to(weights.dtype)
    return weights
