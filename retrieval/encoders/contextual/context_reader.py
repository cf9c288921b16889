"""What a contextual encoder computes, here and in an exported folder: the second stage, behind the context in use."""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.contextual.families import backbone_of
from retrieval.encoders.contextual.second_stage import Prefix, read_prefix, read_texts, unplaced
from retrieval.encoders.pooling import pool, weighted_mean

Context = Tensor | Literal["null"] | None
"""Vectors (J, width) of a first stage; the null vector in the place of all of them; or nothing before a text."""

_EMPTY_ALLOWANCE = 2  # times as many documents are drawn as are wanted
_NULL_DEVIATION = 0.02  # of new vectors, if the model's configuration names none


class ContextReader(nn.Module):
    """Reads texts behind a context: what a module with a ``transformer``, the second stage's, mixes in.

    It calls ``add_prefix`` once. Weights: ``null``, and as the form says ``prompts`` and ``head``.
    """

    transformer: nn.Module
    contextual_form: Any
    null: nn.Parameter
    prompts: nn.Sequential | None
    head: nn.Sequential | None
    context_vectors: Tensor | None
    context_mode: Literal["unset", "vectors", "null", "none"]

    def add_prefix(self, form: Any, fresh_seed: int = 0) -> None:
        """Makes the weights that ``form``, a ``ContextualForm`` or the like, asks for, fresh by ``fresh_seed``.

        Raises ``UserError`` for a family without a way in for vectors.
        """
        config: Any = self.transformer.config
        width = int(config.hidden_size)
        self.contextual_form = form
        self._backbone = backbone_of(self.transformer)
        generator = torch.Generator().manual_seed(fresh_seed)
        deviation = getattr(config, "initializer_range", _NULL_DEVIATION)
        self.null = nn.Parameter(torch.randn(width, generator=generator) * deviation)
        self.prompts = perceptron(width, form.prompts * width, nn.ReLU(), generator) if form.prompts else None
        self.head = perceptron(width, width, nn.ReLU(), generator) if form.residual_head else None
        self.register_buffer("context_vectors", None, persistent=False)
        self.context_mode = "unset"
        self._prefix: Prefix | None = None  # of the context in use, while weights stay as they are

    def places(self, context: Context) -> int:
        """Number of vectors in a context."""
        if isinstance(context, Tensor):
            return len(context)
        return 0 if context is None else self.contextual_form.vectors

    def require_room(self, vectors: int, max_length: int) -> None:
        """Raises ``UserError`` where texts of ``max_length`` tokens behind ``vectors`` are over the model's positions.

        That is where context vectors take up positions, and each position has a learned vector.
        """
        form, positions = self.contextual_form, self._backbone.positions
        if form.text_positions == "from_zero" or positions is None or vectors + form.prompts + max_length <= positions:
            return
        raise UserError(
            f"Texts of up to {max_length} tokens behind {vectors} context vectors and {form.prompts} prompt"
            f" vectors exceed the model's {positions}, because these vectors take up positions. Lower the"
            f" encoder's max_length to {max(positions - vectors - form.prompts, 0)}, or take fewer documents"
            " (context_documents in training, documents of 'raytriever context'). Or train with text_positions"
            " from_zero, where the context takes up no positions."
        )

    def hold_context(self, context: Context) -> None:
        """Texts are read in ``context`` from now on. Raises ``UserError`` for vectors of another width."""
        if not isinstance(context, Tensor):
            self._prefix, self.context_vectors = None, None
            self.context_mode = "none" if context is None else "null"
            return
        if context.ndim != 2 or context.shape[1] != len(self.null) or not len(context):
            raise UserError(
                f"The context has the shape {tuple(context.shape)}. It must be (documents, {len(self.null)}), with"
                " at least one document."
            )
        self._prefix, self.context_mode = None, "vectors"
        self.context_vectors = context.detach().to(self.null.device)

    def forget_context(self) -> None:
        """Removes the context, as before any was held."""
        self._prefix, self.context_mode, self.context_vectors = None, "unset", None

    def prefix_in_use(self) -> Prefix:
        """The prefix of the context in use. It is computed once if there are no gradients."""
        mode = self.context_mode
        context: Context = self.context_vectors if mode == "vectors" else "null" if mode == "null" else None
        if torch.is_grad_enabled():
            return ContextReader.read_context(self, context)  # by its class: see ``ShardedUnit``
        if self._prefix is None:
            self._prefix = ContextReader.read_context(self, context)
        return self._prefix

    def read_context(self, context: Context, *, droppable: bool = False) -> Prefix:
        """The prefix of texts. ``droppable``: single vectors will be replaced by the null vector."""
        form, device, null = self.contextual_form, self.null.device, self.null[None]
        given = context if isinstance(context, Tensor) else null[:0]
        slots = self.places(context)
        nulls = slots - len(given)
        with_null = nulls > 0 or droppable
        vectors = [given.to(null.dtype)]
        weights = [torch.ones(len(given), device=device)]
        if with_null:
            vectors.append(null)
            weights.append(torch.full((1,), float(nulls), device=device))
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

    def pooled(
        self,
        features: Mapping[str, Tensor],
        prefix: Prefix,
        pooling: str,
        dropped: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """One vector (n, width) a text, behind ``prefix``, from its last states and the head.

        ``dropped`` bool (n, J): documents to replace by the null vector in a text's context, for a ``droppable``
        prefix. ``hidden`` bool (n, J): documents to leave out, as if the context were smaller.
        """
        mask = features["attention_mask"]
        weights = _weights(prefix, dropped, hidden)
        is_all = self.contextual_form.pooled == "all"
        states = read_texts(self._backbone, prefix, features["input_ids"], mask, weights, prefix_too=is_all)
        if is_all:
            before = prefix.weights.expand(len(mask), -1) if weights is None else weights
            vectors = weighted_mean(states, torch.cat([before, mask.to(before.dtype)], dim=1))
        else:
            vectors = pool(states, mask, pooling)
        if self.head is not None:
            vectors = self.head(vectors.to(self.null.dtype)) + vectors  # the sum is in float32 again
        return vectors

    def train(self, mode: bool = True) -> "ContextReader":
        """Forgets the computed prefix when training begins or ends, because weights change."""
        if mode or self.training:
            self._prefix = None
        return super().train(mode)

    def _apply(self, *arguments: Any, **keywords: Any) -> "ContextReader":
        self._prefix = None  # on another device or in another precision
        super()._apply(*arguments, **keywords)  # type: ignore[no-untyped-call]
        return self


def own_weights(module: ContextReader) -> dict[str, nn.Parameter]:
    """The weights that ``add_prefix`` made, by name: null vector, prompt vectors and head."""
    own = ("null", "prompts", "head")
    return {name: value for name, value in module.named_parameters() if name.split(".")[0] in own}


def vectors_sha256(vectors: Tensor) -> str:
    """SHA-256 of a context's numbers, so equal contexts of one model have equal ones."""
    return hashlib.sha256(vectors.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def perceptron(width: int, to: int, activation: nn.Module, generator: torch.Generator) -> nn.Sequential:
    """Two linear layers from ``width`` over ``width`` to ``to`` features, with fresh weights and no bias at first."""
    inner, outer = nn.Linear(width, width), nn.Linear(width, to)
    with torch.no_grad():
        for linear in (inner, outer):
            linear.weight.normal_(0.0, width**-0.5, generator=generator)
            linear.bias.zero_()
    return nn.Sequential(inner, activation, outer)


def _weights(prefix: Prefix, dropped: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """(n, P): the number of equal vectors that each row of the prefix represents, for each text.

    None: as the prefix says.
    """
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


def drawn_rows(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """Rows, drawn without replacement, of ``total`` documents: candidates for a context of ``count``, in order.

    Twice as many, where there are: some may be empty.
    """
    return np.random.default_rng(seed).choice(total, min(total, _EMPTY_ALLOWANCE * count), replace=False)
