"""The states of chosen layers of a transformer, without keeping those of all."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.retrieval.encoders.pooling import pool
from raytriever.retrieval.encoders.specification import Pooling
from raytriever.retrieval.encoders.structure import transformer_blocks
from raytriever.retrieval.errors import UserError


class LayerStates:
    """Pooled states of ``layers`` (1 the first block, ascending, the last layer last) in one pass of ``transformer``.

    The numbers are Hugging Face's for ``hidden_states``: a layer's state is the output of its block, and the last
    layer's is ``last_hidden_state``. So where a model ends in a norm (T5, ModernBERT, most decoders), the last layer
    alone is normed.

    The hooks stay on the blocks for good and are idle but in a call: a pass that is compiled takes them in once, and
    one that is computed again in the backward pass (activation checkpointing) finds them idle.
    """

    def __init__(self, transformer: nn.Module, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._mask: Tensor | None = None
        self._pooling: Pooling = "cls"
        self._found: dict[int, Tensor] | None = None  # None: idle
        found = numbered_blocks(transformer)
        for layer in self.layers[:-1]:
            found[layer - 1].register_forward_hook(partial(self._keep, layer))

    def __call__(self, transformer: nn.Module, features: Mapping[str, Tensor], pooling: Pooling) -> Tensor:
        """Float32 (n, m, hidden). With reentrant checkpointing of blocks, a ``RuntimeError``: it has no gradients."""
        mask = features["attention_mask"]
        self._mask, self._pooling, self._found = mask, pooling, {}
        try:
            last = transformer(**features).last_hidden_state
            found = self._found
        finally:
            self._mask = self._found = None
        if torch.is_grad_enabled() and any(state.ndim == 2 for state in found.values()):
            raise RuntimeError("states of layers have no gradient under reentrant checkpointing: use_reentrant=False")
        states = [found[layer] for layer in self.layers[:-1]]
        pooled = [state if state.ndim == 2 else pool(state, mask, pooling) for state in (*states, last)]
        return torch.stack(pooled, dim=1)

    def _keep(self, layer: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        """Pools at once where no gradient is wanted.

        With gradients the block's output is kept as it is: the backward pass needs it anyway, and a block that is
        computed again must save the same tensors both times, so nothing may be computed here.
        """
        if self._found is None or self._mask is None:
            return
        state = output[0] if isinstance(output, tuple) else output
        self._found[layer] = state if torch.is_grad_enabled() else pool(state, self._mask, self._pooling)


def numbered_blocks(transformer: nn.Module) -> list[nn.Module]:
    """The transformer's layers in order. Raises ``UserError`` where they aren't as many as its configuration says."""
    config: Any = transformer.config
    blocks, count = transformer_blocks(transformer), config.num_hidden_layers
    if len(blocks) != count:
        raise UserError(
            f"{type(transformer).__name__} has {count} layers but {len(blocks)} blocks for them (in some models they"
            " share their weights), so single ones can't be read. Use the form single."
        )
    return blocks
