"""The families of transformers that can be second stages.

Hidden states, positions and masks come from us, the layers are the family's own; nothing of it is replaced or patched.
A family says how it embeds tokens and vectors, what it adds to attention scores by position, and of a layer the parts
that can be computed by themselves. A position of ``UNPLACED`` is none: no learned position, no rotation, no relative
bias, in reach of every local layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

# ruff: noqa: ARG002  # each family makes use of part of what it is told
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
    """What positions do in a layer's attention: ``bias`` (1, heads or 1, rows, rows), added to scores; ``rotation``."""

    bias: Tensor | None = None
    rotation: Rotation | None = None

    def of_rows(self, rows: slice) -> "Guide":
        """For a sequence of those rows alone."""
        return Guide(
            None if self.bias is None else self.bias[:, :, rows, rows],
            None if self.rotation is None else (self.rotation[0][:, rows], self.rotation[1][:, rows]),
        )


class Layer(ABC):
    """One layer of a family, in parts. States are (n, rows, width), heads (n, heads, rows, head size)."""

    attention_name: ClassVar[str]
    """The module of its attention."""
    matrices: ClassVar[tuple[str, ...]] = ()
    """What that calls its matrices of queries, keys and values."""

    def __init__(self, module: nn.Module, heads: int) -> None:
        self.module: Any = module
        self.heads = heads

    @property
    def attention(self) -> Any:
        """The layer's attention."""
        return self.module.get_submodule(self.attention_name)

    @property
    def attention_dropout(self) -> float:
        """Probability in training."""
        attention = self.attention
        return float(attention.attention_dropout if hasattr(attention, "attention_dropout") else attention.dropout.p)

    def project(self, states: Tensor, rotation: Rotation | None, first_query: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (of the rows from ``first_query`` on), keys, values."""
        attention = self.attention
        query, key, value = (getattr(attention, name) for name in self.matrices)
        queries = rotated(self._split(query(states[:, first_query:])), rotation, first_query)
        return queries, rotated(self._split(key(states)), rotation), self._split(value(states))

    @abstractmethod
    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        """The layer's output for rows ``states`` (n, rows, width), given what they attended to, of the same shape."""

    def whole(self, states: Tensor, bias: Tensor, rotation: Rotation | None) -> Tensor:
        """The family's own forward pass. ``bias`` (n, 1 or heads, 1 or rows, rows) is added to the scores."""
        rotary = {} if rotation is None else {"position_embeddings": rotation}
        output: Tensor | tuple[Tensor, ...] = self.module(states, attention_mask=bias, **rotary)
        return output[0] if isinstance(output, tuple) else output

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], self.heads, projected.shape[-1] // self.heads).transpose(1, 2)


class Backbone(ABC):
    """A transformer as a second stage. Keeps the module, so what is added to its layers (LoRA) counts."""

    layer_class: ClassVar[type[Layer]]

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer: Any = transformer
        config: Any = transformer.config
        self.layers = [self.layer_class(block, config.num_attention_heads) for block in transformer_blocks(transformer)]

    @property
    def in_parts(self) -> bool:
        """Whether the layers' parts may be called: not where more is done around a layer's own forward pass.

        It may be compiled, computed again in the backward pass, or have its weights gathered before and given up after.
        """
        modules = [layer.module for layer in self.layers]
        return not any("forward" in vars(m) or m._forward_pre_hooks or m._forward_hooks for m in modules)

    @property
    def positions(self) -> int | None:
        """How many positions have a learned vector; None where positions don't run out."""
        return position_limit(self.transformer)

    @abstractmethod
    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(n, rows, width) from token ids (n, rows) at int64 positions (rows,)."""

    @abstractmethod
    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """(rows, width) from as many vectors in the place of tokens, of no token type, at int64 positions (rows,)."""

    @abstractmethod
    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        """Of each layer, for a sequence at ``positions`` (rows,); in the precision and on the device of ``states``."""

    def finish(self, states: Tensor) -> Tensor:
        """The last hidden states from the last layer's output."""
        return states


class BertLayer(Layer):
    """BERT's, RoBERTa's."""

    attention_name = "attention.self"
    matrices = ("query", "key", "value")

    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        module = self.module
        states = module.attention.output(attended, states)
        completed: Tensor = module.output(module.intermediate(states), states)
        return completed


class Bert(Backbone):
    """BERT, MiniLM and RoBERTa: positions are part of the embedding, of which a context vector gets the LayerNorm."""

    layer_class: ClassVar[type[Layer]] = BertLayer

    def _places(self, positions: Tensor) -> Tensor:
        padding = self.transformer.embeddings.position_embeddings.padding_idx  # RoBERTa's first place is behind it
        return positions if padding is None else positions + padding + 1

    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        places = self._places(positions).expand(input_ids.shape)
        embedded: Tensor = self.transformer.embeddings(input_ids=input_ids, position_ids=places)
        return embedded

    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        embeddings, placed = self.transformer.embeddings, positions != UNPLACED
        if bool(placed.any()):
            vectors = vectors.index_add(
                0, placed.nonzero()[:, 0], embeddings.position_embeddings(self._places(positions[placed]))
            )
        embedded: Tensor = embeddings.dropout(embeddings.LayerNorm(vectors))
        return embedded

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        return [Guide()] * len(self.layers)


class MpnetLayer(Layer):
    """MPNet's."""

    attention_name = "attention.attn"
    matrices = ("q", "k", "v")

    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        module, attention = self.module, self.module.attention
        states = attention.LayerNorm(attention.dropout(attention.attn.o(attended)) + states)
        completed: Tensor = module.output(module.intermediate(states), states)
        return completed


class Mpnet(Bert):
    """MPNet: BERT with a relative bias besides, which neither goes to nor comes from what has no position."""

    layer_class: ClassVar[type[Layer]] = MpnetLayer

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        encoder = self.transformer.encoder
        buckets = encoder.relative_position_bucket(positions[None, :] - positions[:, None])
        placed = positions != UNPLACED
        bias = encoder.relative_attention_bias(buckets) * (placed[:, None] & placed)[:, :, None]
        return [Guide(bias=bias.permute(2, 0, 1)[None])] * len(self.layers)


class NomicLayer(Layer):
    """NomicBERT's."""

    attention_name = "self_attn"
    matrices = ("q_proj", "k_proj", "v_proj")

    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        module = self.module
        states = states + module.post_attention_dropout(module.self_attn.o_proj(attended))
        states = module.post_attention_layernorm(states)
        completed: Tensor = module.post_mlp_layernorm(states + module.post_mlp_dropout(module.mlp(states)))
        return completed


class Nomic(Backbone):
    """NomicBERT: rotary positions; what has none is not rotated."""

    layer_class: ClassVar[type[Layer]] = NomicLayer

    def embed_tokens(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.transformer.embeddings(input_ids=input_ids)
        return embedded

    def embed_vectors(self, vectors: Tensor, positions: Tensor) -> Tensor:
        embeddings = self.transformer.embeddings
        embedded: Tensor = embeddings.dropout(embeddings.LayerNorm(vectors))
        return embedded

    def guides(self, positions: Tensor, states: Tensor) -> Sequence[Guide]:
        # position 0 turns nothing
        rotation = self.transformer.rotary_emb(states, positions.clamp(min=0)[None])
        return [Guide(rotation=rotation)] * len(self.layers)


class ModernBertLayer(Layer):
    """ModernBERT's, whose queries, keys and values are one matrix."""

    attention_name = "attn"

    def project(self, states: Tensor, rotation: Rotation | None, first_query: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.attention.Wqkv(self.module.attn_norm(states))
        queries, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        return rotated(queries[:, :, first_query:], rotation, first_query), rotated(keys, rotation), values

    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        attention = self.attention
        states = states + attention.out_drop(attention.Wo(attended))
        completed: Tensor = states + self.module.mlp(self.module.mlp_norm(states))
        return completed


class ModernBert(Backbone):
    """ModernBERT: rotary positions, and local layers, in which what has no position is in everyone's reach."""

    layer_class: ClassVar[type[Layer]] = ModernBertLayer

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
        return [of_kind[layer.module.attention_type] for layer in self.layers]

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
            f"A contextual encoder can't be made from {type(transformer).__name__} ({config.model_type}): there is no"
            f" way to put vectors in the place of its tokens. Supported are {', '.join(sorted(BACKBONES))}."
        )
    return BACKBONES[config.model_type](transformer)


def rotated(heads: Tensor, rotation: Rotation | None, first_row: int = 0) -> Tensor:
    """Rotary positions of the rows from ``first_row`` on (Su et al. 2021), halves of a head paired, in float32."""
    if rotation is None:
        return heads
    cosines, sines = (part[:, None, first_row:] for part in rotation)
    wide = at_least_float32(heads)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)
