"""The families of transformers that can be second stages.

Hidden states, positions and masks come from us. The layers are the family's own, and none of them is replaced or
patched. A family says how it embeds tokens and vectors, and what it adds to attention scores by position. It also names
the parts of a layer that can be computed by themselves. A position of ``UNPLACED`` is none: no learned position, no
rotation, no relative bias. Every local layer reaches it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

# ruff: noqa: ARG002  # each family uses some of its arguments
import torch
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.structure import position_limit, transformer_blocks

UNPLACED = -1

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines (1, rows, head size) of rotary positions."""


@dataclass(frozen=True)
class Guide:
    """The effect of positions in a layer's attention: ``bias`` (1, heads or 1, rows, rows) on scores; ``rotation``."""

    bias: Tensor | None = None
    rotation: Rotation | None = None


class Backbone(ABC):
    """A transformer as a second stage. Keeps the module, so what is added to its layers (LoRA) counts.

    States are (n, rows, width), heads (n, heads, rows, head size).
    """

    attention_name: ClassVar[str]
    """Name of the attention module in a layer."""
    matrices: ClassVar[tuple[str, ...]] = ()
    """Names of its query, key and value matrices."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer: Any = transformer
        self.layers = transformer_blocks(transformer)

    @property
    def in_parts(self) -> bool:
        """Whether the layers' parts may be called: not where more is done around a layer's own forward pass.

        It may be compiled, computed again in the backward pass, or have its weights gathered before and given up after.
        """
        return not any("forward" in vars(m) or m._forward_pre_hooks or m._forward_hooks for m in self.layers)

    @property
    def positions(self) -> int | None:
        """Number of positions with a learned vector. None where positions don't run out."""
        return position_limit(self.transformer)

    @abstractmethod
    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(n, rows, width), what the first layer reads of tokens at ``positions`` (rows,), none of them unplaced."""

    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """(rows, width) of vectors that stand in the place of tokens."""
        embeddings = self.transformer.embeddings
        embedded: Tensor = embeddings.dropout(embeddings.LayerNorm(vectors))
        return embedded

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        """Each layer's guide for a sequence at ``positions`` (rows,); precision and device are those of ``states``."""
        return [Guide()] * len(self.layers)

    def project(
        self, layer: Any, states: Tensor, rotation: Rotation | None, first_query: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's queries (of the rows from ``first_query`` on), keys, values; the last rows of ``rotation``."""
        attention = layer.get_submodule(self.attention_name)
        query, key, value = (getattr(attention, name) for name in self.matrices)
        queries = rotated(self._split(query(states[:, first_query:])), rotation)
        return queries, rotated(self._split(key(states)), rotation), self._split(value(states))

    def attention_dropout(self, layer: nn.Module) -> float:
        """Probability in this mode."""
        attention: Any = layer.get_submodule(self.attention_name)
        found = attention.attention_dropout if hasattr(attention, "attention_dropout") else attention.dropout.p
        return float(found) if self.transformer.training else 0.0

    @abstractmethod
    def complete(self, layer: Any, states: Tensor, attended: Tensor) -> Tensor:
        """A layer's output for rows ``states`` (n, rows, width), given what they attended to, of the same shape."""

    def whole(self, layer: nn.Module, states: Tensor, bias: Tensor, rotation: Rotation | None) -> Tensor:
        """A layer's own forward pass. ``bias`` (n, 1 or heads, 1 or rows, rows) is added to the scores."""
        rotary = {} if rotation is None else {"position_embeddings": rotation}
        output: Tensor | tuple[Tensor, ...] = layer(states, attention_mask=bias, **rotary)
        return output[0] if isinstance(output, tuple) else output

    def finish(self, states: Tensor) -> Tensor:
        """The last hidden states from the last layer's output."""
        return states

    def _split(self, projected: Tensor) -> Tensor:
        heads = self.transformer.config.num_attention_heads
        return projected.view(*projected.shape[:-1], heads, projected.shape[-1] // heads).transpose(1, 2)


class Bert(Backbone):
    """BERT, MiniLM and RoBERTa. Positions are part of the embedding. A context vector gets its LayerNorm only."""

    attention_name = "attention.self"
    matrices = ("query", "key", "value")

    def _places(self, positions: Tensor) -> Tensor:
        padding = self.transformer.embeddings.position_embeddings.padding_idx  # RoBERTa's first place is behind it
        return positions if padding is None else positions + padding + 1

    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        places = self._places(positions).expand(input_ids.shape)
        embedded: Tensor = self.transformer.embeddings(input_ids=input_ids, position_ids=places)
        return embedded

    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        of_places = self.transformer.embeddings.position_embeddings(self._places(positions.clamp(min=0)))
        vectors = vectors + of_places.masked_fill((positions == UNPLACED)[:, None], 0)
        return super().embed_vectors(vectors, positions)

    def complete(self, layer: Any, states: Tensor, attended: Tensor) -> Tensor:
        states = layer.attention.output(attended, states)
        completed: Tensor = layer.output(layer.intermediate(states), states)
        return completed


class Mpnet(Bert):
    """MPNet: BERT with a relative bias besides, which neither goes to nor comes from what has no position."""

    attention_name = "attention.attn"
    matrices = ("q", "k", "v")

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        encoder = self.transformer.encoder
        buckets = encoder.relative_position_bucket(positions[None, :] - positions[:, None])
        placed = positions != UNPLACED
        bias = encoder.relative_attention_bias(buckets) * (placed[:, None] & placed)[:, :, None]
        return [Guide(bias=bias.permute(2, 0, 1)[None])] * len(self.layers)

    def complete(self, layer: Any, states: Tensor, attended: Tensor) -> Tensor:
        attention = layer.attention
        states = attention.LayerNorm(attention.dropout(attention.attn.o(attended)) + states)
        completed: Tensor = layer.output(layer.intermediate(states), states)
        return completed


class Nomic(Backbone):
    """NomicBERT: rotary positions; what has none is not rotated."""

    attention_name = "self_attn"
    matrices = ("q_proj", "k_proj", "v_proj")

    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.transformer.embeddings(input_ids=input_ids)
        return embedded

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        # position 0 turns nothing
        rotation = self.transformer.rotary_emb(states, positions.clamp(min=0)[None])
        return [Guide(rotation=rotation)] * len(self.layers)

    def complete(self, layer: Any, states: Tensor, attended: Tensor) -> Tensor:
        states = states + layer.post_attention_dropout(layer.self_attn.o_proj(attended))
        states = layer.post_attention_layernorm(states)
        completed: Tensor = layer.post_mlp_layernorm(states + layer.post_mlp_dropout(layer.mlp(states)))
        return completed


class ModernBert(Backbone):
    """ModernBERT: rotary positions, and local layers. Every token can reach what has no position."""

    attention_name = "attn"

    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.transformer.embeddings(input_ids)
        return embedded

    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.transformer.embeddings(inputs_embeds=vectors)
        return embedded

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        rotary, config = self.transformer.rotary_emb, self.transformer.config
        places, placed = positions.clamp(min=0)[None], positions != UNPLACED
        far = (positions[:, None] - positions).abs() > config.sliding_window
        unreached = far & placed[:, None] & placed
        reach = states.new_zeros(unreached.shape).masked_fill(unreached, -torch.inf)[None, None]
        of_kind = {
            kind: Guide(reach if kind == "sliding_attention" else None, rotary(states, places, kind))
            for kind in set(config.layer_types)
        }
        return [of_kind[str(layer.attention_type)] for layer in self.layers]

    def project(
        self, layer: Any, states: Tensor, rotation: Rotation | None, first_query: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        # queries, keys and values are one matrix
        queries, keys, values = map(self._split, layer.attn.Wqkv(layer.attn_norm(states)).chunk(3, dim=-1))
        return rotated(queries[:, :, first_query:], rotation), rotated(keys, rotation), values

    def complete(self, layer: Any, states: Tensor, attended: Tensor) -> Tensor:
        states = states + layer.attn.out_drop(layer.attn.Wo(attended))
        completed: Tensor = states + layer.mlp(layer.mlp_norm(states))
        return completed

    def finish(self, states: Tensor) -> Tensor:
        normed: Tensor = self.transformer.final_norm(states)
        return normed


BACKBONES: dict[str, type[Backbone]] = {
    "bert": Bert,
    "roberta": Bert,
    "xlm-roberta": Bert,
    "camembert": Bert,
    "mpnet": Mpnet,
    "nomic_bert": Nomic,
    "modernbert": ModernBert,
}


def backbone_of(transformer: nn.Module) -> Backbone:
    """The transformer as a second stage. Raises ``UserError`` for a family that context vectors have no way into."""
    config: Any = transformer.config
    if config.model_type not in BACKBONES:
        raise UserError(
            f"A contextual encoder can't be made from {type(transformer).__name__} ({config.model_type}), because"
            f" vectors can't replace its tokens. Supported are {', '.join(sorted(BACKBONES))}."
        )
    return BACKBONES[config.model_type](transformer)


def rotated(heads: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotary positions (Su et al. 2021) of a sequence's last rows, halves of a head paired, in float32."""
    if rotation is None:
        return heads
    cosines, sines = (part[:, None, part.shape[1] - heads.shape[2] :] for part in rotation)
    wide = at_least_float32(heads)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)
