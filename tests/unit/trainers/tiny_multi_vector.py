"""A tiny encoder of documents with several vectors, for the tests of multi-layer representations."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrieval.encoders.multi_vector import scalar_mix
from retrieval.encoders.specification import VectorForm
from tests.unit.trainers.tiny import TinyEncoder
from trainers.engine.gradient_cache import pad_vectors
from trainers.objectives.multi_layer import MultiLayer
from trainers.objectives.pair_settings import MultiLayerSettings

LAYERS = {"kind": "layers", "layers": (1, 2)}
FIRST_TOKENS = {"kind": "first_tokens", "tokens": 4}
ALL_TOKENS = {"kind": "all_tokens"}
FORMS = {"layers": LAYERS, "first_tokens": FIRST_TOKENS, "all_tokens": ALL_TOKENS}
SEVERAL = ("multi_vector", "self_contrastive", "last_reg")
TRAINING_FORMS = (*SEVERAL, "average", "scalar_mix", "dual_encoder")
COMBINATIONS = [
    (form, training)
    for form in FORMS
    for training in TRAINING_FORMS
    if (form, training) != ("all_tokens", "scalar_mix")
]


class TinyMultiVectorEncoder(TinyEncoder):
    """Vectors of the two layers, or of tokens of the last one."""

    def __init__(self, form: VectorForm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.form = form
        self.alpha = nn.Parameter(torch.randn(form.vectors)) if form.reduction == "scalar_mix" else None

    def states(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = features["attention_mask"]
        states, weights = self.embedding(features["input_ids"]), mask.unsqueeze(-1).to(self.projection.weight.dtype)
        means = []
        for layer in self.layers:
            states = states + self.dropout(torch.tanh(layer(self.norm(states))))
            means.append((states * weights).sum(dim=1) / weights.sum(dim=1))
        if self.form.kind == "layers":
            return self.projection(torch.stack(means, dim=1)), torch.ones(len(mask), 2, dtype=torch.bool)
        states = self.projection((states + means[-1].unsqueeze(1)) * weights)  # a token's state knows its text
        number = self.form.tokens or states.shape[1]
        states, present = states[:, :number], mask[:, :number].bool()
        return pad_vectors(states * present.unsqueeze(-1), present, number)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        states, present = self.states(features)
        if self.form.reduction in ("average", "scalar_mix"):
            alpha = torch.zeros(states.shape[1]) if self.alpha is None else self.alpha
            return scalar_mix(states, present, alpha)
        assert self.form.reduction == "last"
        return states[:, -1 if self.form.kind == "layers" else 0]


def tiny_multi_layer(
    form: dict[str, Any],
    training_form: str,
    *,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    **settings: Any,
) -> MultiLayer:
    """The multi-layer objective over two tiny encoders with weights that are always the same.

    The form's reduction is the one that goes with ``training_form``.
    """
    torch.manual_seed(7)
    reductions = {"multi_vector": "none", "average": "average", "scalar_mix": "scalar_mix"}
    vector_form = VectorForm(**form, reduction=reductions.get(training_form, "last"))
    if training_form in ("self_contrastive", "last_reg"):
        settings = {"regularisation": 0.3} | settings
    return MultiLayer(
        TinyEncoder(dropout).to(dtype),
        TinyMultiVectorEncoder(vector_form, dropout).to(dtype),
        MultiLayerSettings(training_form=training_form, **settings),
    )
