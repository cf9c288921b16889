"""Several vectors a document, from several layers or tokens of one transformer, and their reductions to one vector.

"Investigating Multi-layer Representations for Dense Passage Retrieval" (MLR, Xie & Lukasiewicz 2025). Also the two
forms it is compared with: ME-BERT (Luan et al. 2021) and ColBERT (Khattab & Zaharia 2020) with one query vector.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.attention import last_states
from retrieval.encoders.export import write_form, write_routes, write_sentence_transformers_folder
from retrieval.encoders.pooling import pool
from retrieval.encoders.specification import Pooling, VectorForm
from retrieval.encoders.structure import numbered_blocks
from retrieval.encoders.text_encoder import TextEncoder


class LayerStates:
    """Pooled states of ``layers`` (1 the first block, ascending, the last layer last) in one pass of ``transformer``.

    The numbers are Hugging Face's for ``hidden_states``: a layer's state is the output of its block, and the last
    layer's is ``last_hidden_state``. So where a model ends in a norm (T5, ModernBERT, most decoders), only the last
    layer is normed.

    The hooks stay on the blocks for good and are idle outside of a call. So a compiled pass captures them once. A pass
    that activation checkpointing recomputes in the backward pass finds them idle.
    """

    def __init__(self, transformer: nn.Module, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, Tensor] | None = None  # None: idle
        found = numbered_blocks(transformer)
        for layer in self.layers[:-1]:
            found[layer - 1].register_forward_hook(partial(self._keep, layer))

    def __call__(self, transformer: nn.Module, features: Mapping[str, Tensor], pooling: Pooling) -> Tensor:
        """Float32 (n, m, hidden)."""
        self._found = {}
        try:
            last = last_states(transformer, features)
            states = [*(self._found[layer] for layer in self.layers[:-1]), last]
        finally:
            self._found = None
        return torch.stack([pool(state, features["attention_mask"], pooling) for state in states], dim=1)

    def _keep(self, layer: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        """Nothing is computed here: a block that is computed again must save the same tensors both times."""
        if self._found is not None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output


class MultiVectorEncoder(TextEncoder):
    """Documents to several vectors, or to the one that these are reduced to, by the modules of a ``TextEncoder``.

    Shares its weights with ``encoder``, which stays the encoder of queries. Layers are pooled as ``encoder`` pools its
    last one ([CLS], masked mean, last token); which states they are, ``LayerStates`` says. Dense layers and
    normalisation are applied to each vector, or to the one that an average leaves.

    ``alpha``, a parameter (m,) in float32: the scalar mix's weights before their softmax, by default 0, which is the
    average; None for other reductions. Raises ``UserError`` for a form that the encoder doesn't have.
    """

    def __init__(self, encoder: TextEncoder, form: VectorForm, alpha: Sequence[float] | None = None) -> None:
        contract = encoder.contract.model_copy(update={"form": str(form)})
        super().__init__(encoder.transformer, encoder.tokenizer, list(encoder.dense), contract)
        _check_form(form, encoder)
        self.form = form
        self.alpha: nn.Parameter | None = None
        if form.reduction == "scalar_mix":
            self.alpha = nn.Parameter(torch.tensor(alpha or [0.0] * (form.vectors or 0)))
        self._layer_states = LayerStates(encoder.transformer, form.layers) if form.kind == "layers" else None

    def states(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All m vectors of each text, before a reduction: float32 (n, m, dimension), and which exist, bool (n, m)."""
        states, present = self._pooled(features)
        return self._finish(states).masked_fill(~present.unsqueeze(-1), 0.0), present

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """What is stored and searched: float32 (n, dimension), or (n, m, dimension) without a reduction.

        For all tokens m is the length of ``features``. A text with fewer than m tokens repeats its first vector,
        because this doesn't change its best inner product.
        """
        states, present = self._pooled(features)
        if not self.form.reduced:
            vectors = self._finish(states)
            return torch.where(present.unsqueeze(-1), vectors, vectors[:, :1])
        if self.form.reduction in ("average", "scalar_mix"):
            alpha = states.new_zeros(states.shape[1]) if self.alpha is None else self.alpha
            return self._finish(scalar_mix(states, present, alpha))
        return self._finish(states[:, -1] if self.form.kind == "layers" else states[:, 0])

    def save(self, folder: Path) -> None:
        """Writes a folder that queries and documents are embedded with, and that sentence-transformers loads.

        There a document's vector is the reduced one if a sentence-transformers module can do it, else the last layer's.
        """
        write_towers(self, self, folder)

    def _pooled(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Float32 (n, m, hidden) and bool (n, m), before dense layers and normalisation."""
        mask = features["attention_mask"]
        if self._layer_states is not None:
            return _all_present(self._layer_states(self.transformer, features, self.contract.pooling))
        tokens = last_states(self.transformer, features)
        if self.form.kind == "single":
            return _all_present(pool(tokens, mask, self.contract.pooling).unsqueeze(1))
        width = self.form.tokens or tokens.shape[1]
        tokens, present = tokens[:, :width].float(), mask[:, :width].bool()
        absent = width - tokens.shape[1]
        return nn.functional.pad(tokens, (0, 0, 0, absent)), nn.functional.pad(present, (0, absent))


def scalar_mix(states: Tensor, present: Tensor, alpha: Tensor) -> Tensor:
    """The average of a text's vectors weighted by softmax(alpha), Eq. 8 of MLR; equal alphas give the plain one.

    ``states`` float32 (n, m, d). ``present`` bool (n, m): the vectors in the softmax, at least one a row. ``alpha``
    (m,). Returns (n, d).
    """
    weights = alpha.to(states.dtype).expand(present.shape).masked_fill(~present, -torch.inf).softmax(dim=1)
    return (weights.unsqueeze(-1) * states.masked_fill(~present.unsqueeze(-1), 0.0)).sum(dim=1)


def _all_present(states: Tensor) -> tuple[Tensor, Tensor]:
    return states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)


def _check_form(form: VectorForm, encoder: TextEncoder) -> None:
    if form.kind == "layers":
        form.require_last_layer(len(numbered_blocks(encoder.transformer)), "layers", "the encoder")
    elif form.kind != "single" and encoder.contract.pooling != "cls":
        raise UserError(
            f"The form {form.kind} compares token states with a query's [CLS] state, but the encoder's pooling is"
            f" {encoder.contract.pooling}. Set its pooling to cls, or use the form layers."
        )


def write_towers(query: TextEncoder, document: TextEncoder, folder: Path) -> None:
    """Writes the encoders of queries and documents as one folder, which ``load_towers`` reads.

    sentence-transformers loads it too, several vectors a document or a reduction that it has no module for as the last
    layer's. Encoders with weights of their own, and averages, take its Router, which it has from release 5 on. Raises
    ``UserError`` where the two differ in pooling, prompts, length, dimension or normalisation.
    """
    require_one_contract(query, document, "the queries' encoder", "the documents' encoder")
    form = document.form
    weights = _layer_weights(document)
    token_average = form.kind == "all_tokens" and form.reduction == "average"
    if weights is not None or token_average or query.transformer is not document.transformer:
        write_routes(
            query.parts(), document.parts(), folder, "mean" if token_average else document.contract.pooling, weights
        )
    else:
        write_sentence_transformers_folder(query.parts(), folder)
    if form.kind != "single" and form.reduction != "last":  # what is left is a plain encoder
        write_form(form, _alpha(document), folder)


def require_one_contract(query: TextEncoder, document: TextEncoder, mine: str, theirs: str) -> None:
    """Two towers are stored as one encoder, so only their weights and the form of a document's vectors may differ.

    Raises ``UserError`` naming whatever else does; ``mine`` and ``theirs``: what the two are to the user.
    """
    alone = document.contract.model_copy(update={"model": query.contract.model, "form": query.contract.form})
    if differing := query.contract.differences(alone):
        raise UserError(
            f"{mine} and {theirs} differ in more than their weights: {differing}. Give both the same pooling,"
            " prompts, lengths and so on, because they are stored as one encoder."
        )


def _layer_weights(document: TextEncoder) -> dict[int, float] | None:
    """The share of each layer in the one vector that is left of several; None where there is no such average."""
    layers = document.form.layers
    if not layers or document.form.reduction not in ("average", "scalar_mix") or document.contract.pooling == "max":
        return None  # sentence-transformers averages before it pools, which for maxima isn't the same
    alpha = torch.tensor(_alpha(document) or [0.0] * len(layers))
    return dict(zip(layers, alpha.softmax(dim=0).tolist(), strict=True))


def _alpha(document: TextEncoder) -> list[float] | None:
    alpha = document.alpha if isinstance(document, MultiVectorEncoder) else None
    return None if alpha is None else [float(each) for each in alpha.detach().float().cpu()]
