"""A causal language model with documents that read each other, weighted by a retriever's similarities.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", section 3. The loss is that of predicting the
next token. Its gradient in the weights trains the retriever. Two streams go through the same weights (Eq. 3 to 8). The
e-stream reads every document by itself. The h-stream is trained to predict tokens, and also reads the e-stream of other
documents.

All supported families of decoders have the same structure and the same names of parts in transformers, so one reading
serves all: normalise, project to queries, keys and values (Qwen3 normalises the first two once more), rotate, attend,
project; normalise, feed forward. Another family may scale, clip or rotate elsewhere, so one that isn't listed is
refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.structure import ShardedUnit
from retrieval.encoders.transformer import checkpoint_activations
from trainers.objectives.revela.cross_attention import Readers, cross_document_attention, find_readers

_LOGITS_AT_ONCE = 2**25  # 128 MiB in float32: 262 tokens of a vocabulary of 128,000

FAMILIES = {
    "llama": "Llama 1 to 3, SmolLM 1 and 2, TinyLlama",
    "mistral": "Mistral without a sliding window",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
}
"""``model_type`` in config.json, and what goes by it."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position: (1, L, D) each."""


def require_decoder(model: Any) -> None:
    """Raises ``UserError`` for a model that is of none of ``FAMILIES``, has a sliding window, or has no head."""
    config, where = model.config, getattr(model, "name_or_path", "") or type(model).__name__
    if config.model_type not in FAMILIES:
        known = "; ".join(f"{name} ({what})" for name, what in FAMILIES.items())
        raise UserError(
            f"The language model {where} is of the family {config.model_type!r}, which in-batch attention doesn't"
            f" support. Supported are these families of decoders with rotary positions: {known}. Choose a language"
            " model of one of them."
        )
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type == "mistral"
    if windowed and window is not None:
        raise UserError(
            f"The language model {where} attends within a sliding window of {window} tokens, but in-batch attention"
            " reads whole documents. If all texts are shorter, the window changes nothing: set sliding_window in its"
            " config.json to null (for Qwen use_sliding_window to false). Otherwise choose another language model."
        )
    if model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} has no language-modelling head, so it predicts no token. Load a causal language"
            " model (AutoModelForCausalLM)."
        )


def project_queries(attention: Any, states: Tensor, rotation: Rotation) -> Tensor:
    """Queries (n, H, L, D) of an attention module from its input (n, L, d)."""
    return _rotated(_heads(attention, "q", states), rotation)


def project_keys_values(attention: Any, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Keys and values, (n, K, L, D) each, of an attention module from its input (n, L, d)."""
    return _rotated(_heads(attention, "k", states), rotation), _heads(attention, "v", states)


def _heads(attention: Any, name: str, states: Tensor) -> Tensor:
    projected: Tensor = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return (projected if norm is None else norm(projected).to(projected.dtype)).transpose(1, 2)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding (Su et al. 2021, "RoFormer"): the halves of (n, heads, L, D) are the pairs' parts.

    In the dtype of the heads, as a kernel under autocast would read them.
    """
    cosines, sines = (each.unsqueeze(1) for each in rotation)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)


class InBatchLayer(nn.Module):
    """A Hugging Face decoder layer, with its modules shared, run on both streams.

    ``is_last``: only the e-stream's keys and values are still needed. ``stacked``: both streams go through the weights
    as one batch. If no weight is trained, each goes by itself, so that the e-stream keeps nothing for a gradient.
    ``value_normalization`` and ``recompute`` as in ``cross_document_attention``.
    """

    def __init__(
        self, layer: nn.Module, *, is_last: bool, stacked: bool, value_normalization: bool, recompute: bool
    ) -> None:
        super().__init__()
        parts: Any = layer
        self.input_layernorm = parts.input_layernorm
        self.self_attn = parts.self_attn
        self.post_attention_layernorm = parts.post_attention_layernorm
        self.mlp = parts.mlp
        self.is_last = is_last
        self.stacked = stacked
        self.value_normalization = value_normalization
        self.recompute = recompute

    def forward(
        self, e_states: Tensor, h_states: Tensor | None, rotation: Rotation, similarity: Tensor, readers: Readers
    ) -> tuple[Tensor | None, Tensor]:
        """States of the e-stream (None from the last layer) and of the h-stream, (B, L, d) each, from those before.

        ``h_states`` None: the h-stream's are the e-stream's, as in the first layer. ``similarity``: Sim (B, B).
        """
        if h_states is not None and not self.stacked:
            return self._apart(e_states, h_states, rotation, similarity, readers)
        documents = len(e_states)
        states = e_states if h_states is None else torch.cat([e_states, h_states])
        normed = self.input_layernorm(states)
        keys, values = project_keys_values(self.self_attn, normed, rotation)
        kept = slice(-documents, None) if self.is_last else slice(None)
        queries = project_queries(self.self_attn, normed[kept], rotation)
        attended = self._attend(queries, keys[kept], values[kept])
        read = self._read(queries[-documents:], keys[:documents], values[:documents], similarity, readers)
        h_attended = attended[-documents:] + read
        if self.is_last:
            return None, self._finish(states[-documents:], h_attended)
        if not self.stacked:
            return self._finish(states, attended), self._finish(states, h_attended)
        if h_states is None:
            states = torch.cat([states, states])
        states, fed_forward = self._finish_but_for_sum(states, torch.cat([attended[:documents], h_attended]))
        # parted before they are added: FSDP attaches what it does before the backward pass to no view
        return states[:documents] + fed_forward[:documents], states[documents:] + fed_forward[documents:]

    def _apart(
        self, e_states: Tensor, h_states: Tensor, rotation: Rotation, similarity: Tensor, readers: Readers
    ) -> tuple[Tensor | None, Tensor]:
        e_normed, h_normed = self.input_layernorm(e_states), self.input_layernorm(h_states)
        e_keys, e_values = project_keys_values(self.self_attn, e_normed, rotation)
        h_queries = project_queries(self.self_attn, h_normed, rotation)
        attended = self._attend(h_queries, *project_keys_values(self.self_attn, h_normed, rotation))
        h_attended = attended + self._read(h_queries, e_keys, e_values, similarity, readers)
        h_states = self._finish(h_states, h_attended)
        if self.is_last:
            return None, h_states
        e_queries = project_queries(self.self_attn, e_normed, rotation)
        return self._finish(e_states, self._attend(e_queries, e_keys, e_values)), h_states

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Eq. 4: causal attention of documents to themselves, (n, H, L, D); padding, on the right, is never read."""
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            dropout_p=self.self_attn.attention_dropout if self.training else 0.0,
            scale=self.self_attn.scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    def _read(self, queries: Tensor, keys: Tensor, values: Tensor, similarity: Tensor, readers: Readers) -> Tensor:
        """Eq. 5 to 7."""
        return cross_document_attention(
            queries,
            keys,
            values,
            similarity,
            readers,
            value_normalization=self.value_normalization,
            recompute=self.recompute,
        )

    def _finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after the attention: (n, L, d) from the layer's input and heads (n, H, L, D)."""
        states, fed_forward = self._finish_but_for_sum(states, attended)
        return states + fed_forward

    def _finish_but_for_sum(self, states: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        states = states + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return states, self.mlp(self.post_attention_layernorm(states))


def next_token_loss(states: Tensor, head: nn.Linear, input_ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, int]:
    """Mean over all tokens but each document's first, and their number; in float32 at least.

    ``states`` (B, L, d): the input of ``head``, which gives logits. ``input_ids`` int64 (B, L). ``lengths``: real
    tokens of each document. Logits are computed some rows at a time, and again in the backward pass. Raises
    ``UserError`` where no document has a second token.
    """
    starts = range(0, len(lengths) * states.shape[1], states.shape[1])
    spans = zip(starts, lengths, strict=True)
    places = torch.cat([torch.arange(start, start + length - 1, device=states.device) for start, length in spans])
    if len(places) == 0:
        raise UserError(
            f"None of the {len(lengths)} documents of a batch has two tokens, so no next token can be predicted. Leave"
            " out texts this short."
        )
    rows = states.flatten(0, 1).index_select(0, places)
    targets = input_ids.flatten().index_select(0, places + 1)
    chunk = max(1, _LOGITS_AT_ONCE // head.out_features)
    total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
    for each in zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True):
        total = total + checkpoint(_summed, head, *each, use_reentrant=False, preserve_rng_state=False)
    return total / len(places), len(places)


def _summed(head: nn.Module, states: Tensor, targets: Tensor) -> Tensor:
    logits = head(states)
    with torch.autocast(logits.device.type, enabled=False):
        return functional.cross_entropy(at_least_float32(logits), targets, reduction="sum")


class InBatchLanguageModel(ShardedUnit):
    """Predicts each document's tokens from those before and from the other documents of its batch.

    ``model``: a Hugging Face causal language model of one of ``FAMILIES``, plain or with LoRA in it. Its modules are
    shared, and it stays usable by itself. ``value_normalization``: Eq. 6. ``frozen``: none of its weights is trained,
    so that nothing of the e-stream is kept for a gradient. ``activation_checkpointing``: a layer keeps only its input
    and is recomputed in the backward pass, dropout included. ``recompute_reading``: only the b_ij of Eq. 5 are
    recomputed. With checkpointing too they are computed three times, in less memory. Dropout is the configuration's (of
    the attention within documents) and LoRA's. Raises ``UserError`` for another family of models.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_normalization: bool = True,
        frozen: bool = False,
        activation_checkpointing: bool = False,
        recompute_reading: bool = True,
    ) -> None:
        super().__init__()
        require_decoder(model)
        if frozen:
            model.requires_grad_(False)
        causal: Any = model
        decoder = causal.get_decoder()
        self.find_readers = find_readers  # an estimate's similarities have no values, so it puts another here
        self.embeddings = decoder.embed_tokens
        self.layers = nn.ModuleList(
            InBatchLayer(
                layer,
                is_last=layer is decoder.layers[-1],
                stacked=not frozen,
                value_normalization=value_normalization,
                recompute=recompute_reading,
            )
            for layer in decoder.layers
        )
        self.norm = decoder.norm
        self.rotation = decoder.rotary_emb
        self.lm_head: nn.Linear = causal.get_output_embeddings()
        if activation_checkpointing:
            checkpoint_activations(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, similarity: Tensor) -> tuple[Tensor, int]:
        """The mean loss of all tokens but each document's first, and their number.

        ``input_ids``, ``attention_mask``: int64 (B, L), right-padded. ``similarity``: Sim (B, B); row i says what
        document i reads, and the diagonal doesn't count. Raises ``UserError`` for a document without a token, or where
        none has two, and ``ValueError`` for another padding.
        """
        readers = self.find_readers(attention_mask, similarity)
        states = self.last_states(input_ids, similarity, readers)
        return next_token_loss(states, self.lm_head, input_ids, readers.lengths)

    def last_states(self, input_ids: Tensor, similarity: Tensor, readers: Readers) -> Tensor:
        """The states for the logits, (B, L, d). Places of padding have arbitrary values."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        e_states: Tensor | None = self.embeddings(input_ids)
        h_states: Tensor | None = None
        rotation = self.rotation(e_states, positions)
        for layer in self.layers:
            e_states, h_states = layer(e_states, h_states, rotation, similarity, readers)
        normed: Tensor = self.norm(h_states)
        return normed
