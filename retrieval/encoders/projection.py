"""A layer behind the pooling that the encoder's folder lacks: a fresh one to train, or the model's own pooler."""

from typing import Any

import torch
from torch import nn

from raytriever.retrieval.encoders.modules import DenseLayer
from raytriever.retrieval.encoders.specification import Pooling, Projection
from raytriever.retrieval.errors import UserError

_STANDARD_DEVIATION = 0.02  # of fresh weights, where the model's configuration names none


def added_layer(
    projection: Projection, transformer: nn.Module, pooling: Pooling, width: int, fresh_seed: int | None
) -> DenseLayer:
    """The layer from ``width`` to ``width`` features that ``projection`` asks for, to be exported as a Dense module.

    A fresh layer is drawn by ``fresh_seed`` alone, as the model's family draws its layers. Raises ``UserError`` where
    it is None, as outside training, and for a pooler that isn't there or isn't over the first token's state.
    """
    activation = nn.Tanh() if projection == "pooler_tanh" else nn.Identity()
    if projection != "linear":
        return DenseLayer(_copied_pooler(transformer, pooling, width), activation)
    if fresh_seed is None:
        raise UserError(
            "The encoder's projection is 'linear': a fresh layer, whose vectors mean nothing before it is trained."
            " Train with it, and give the trained model's folder, which holds the layer, without projection here."
        )
    config: Any = transformer.config
    deviation = getattr(config, "initializer_range", _STANDARD_DEVIATION)
    linear = nn.Linear(width, width)
    with torch.no_grad():
        linear.weight.normal_(0.0, deviation, generator=torch.Generator().manual_seed(fresh_seed))
        linear.bias.zero_()
    return DenseLayer(linear, activation)


def _copied_pooler(transformer: nn.Module, pooling: Pooling, width: int) -> nn.Linear:
    """The pooler's linear map, as weights of its own: the transformer's stay as they are in its folder."""
    if pooling != "cls":
        raise UserError(
            f"The encoder's projection is the model's pooler, which maps the first token's state, but pooling is"
            f" {pooling}. Set pooling to cls, or projection to 'linear'."
        )
    dense = getattr(getattr(transformer, "pooler", None), "dense", None)
    if not isinstance(dense, nn.Linear) or (dense.in_features, dense.out_features) != (width, width):
        raise UserError(
            f"The encoder's projection is the model's pooler, but its folder has no pooler from {width} to {width}"
            " features. Set projection to 'linear' for a fresh layer."
        )
    linear = nn.Linear(width, width, bias=dense.bias is not None)
    linear.load_state_dict(dense.state_dict())
    return linear
