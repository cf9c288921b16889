"""Families of transformers as second stages: hidden states, positions and masks come from us, the layers are their own.

A family says how it embeds tokens and vectors, what it adds to attention scores by position, and of a layer the parts
that can be computed by themselves. Nothing of it is replaced or patched. A position of ``UNPLACED`` is none: no learned
position, no rotation, no relative bias, in reach of every local layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from raytriever.retrieval.encoders.structure import position_limit, transformer_blocks

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

    def __init__(self, module: nn.Module, heads: int) -> None:
        self.module: Any = module
        self.heads = heads

    @property
    @abstractmethod
    def attention_dropout(self) -> float:
        """Probability in training."""

    @abstractmethod
    def project(self, states: Tensor, rotation: Rotation | None, first_query: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (of the rows from ``first_query`` on), keys, values."""

    @abstractmethod
    def complete(self, states: Tensor, attended: Tensor) -> Tensor:
        """The layer's output for rows ``states`` (n, rows, width), given what they attended to, of the same shape."""

    @abstractmethod
    def whole(self, states: Tensor, bias: Tensor, rotation: Rotation | None) -> Tensor:
        """The family's own forward pass. ``bias`` (n, 1 or heads, 1 or rows, rows) is added to the scores."""

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
