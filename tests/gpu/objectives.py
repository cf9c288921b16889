"""Every kind of objective over a tiny encoder, and stored batches for it. A further kind is one line of ``KINDS``."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pydantic import TypeAdapter
from torch import nn

from raytriever.retrieval.encoders.adapter import LoraSettings, add_adapter
from raytriever.retrieval.encoders.specification import EncoderSettings
from raytriever.retrieval.encoders.towers import load_towers
from raytriever.trainers.kinds import ObjectiveSettings, build_objective
from raytriever.trainers.objective import Objective
from tests.unit.trainers.tiny import random_batch
from tests.unit.trainers.triplet_batches import triplet_batch

LAYERS = {"kind": "layers", "layers": [1, 2]}
TOKENS = {"kind": "first_tokens", "tokens": 3}

# name: the objective's settings, the form of a document's vectors, its stored batches
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Any]] = {
    "contrastive": ({"kind": "contrastive"}, None, random_batch),
    "contrastive, cached": ({"kind": "contrastive", "chunk_size": 3, "gradient_cache": True}, None, random_batch),
    "adaptive_margin": ({"kind": "adaptive_margin"}, None, triplet_batch),
    "adaptive_margin, static": (
        {"kind": "adaptive_margin", "target": "static", "margin": 0.5}, None, triplet_batch
    ),
    "margin_mse": ({"kind": "margin_mse"}, None, triplet_batch),
    "multi_layer": ({"kind": "multi_layer", "training_form": "multi_vector"}, LAYERS, random_batch),
    "multi_layer, self_contrastive": (
        {"kind": "multi_layer", "training_form": "self_contrastive", "regularisation": 0.1},
        LAYERS | {"reduction": "last"},
        random_batch,
    ),
    "multi_layer, scalar_mix": (
        {"kind": "multi_layer", "training_form": "scalar_mix"}, LAYERS | {"reduction": "scalar_mix"}, random_batch
    ),
    "multi_layer, tokens": ({"kind": "multi_layer", "training_form": "multi_vector"}, TOKENS, random_batch),
}  # fmt: skip


def make_objective(name: str, folder: Path, lora: bool = False) -> Objective[Any]:
    """The objective ``name`` of ``KINDS`` around the encoder in ``folder``, on the CPU in float32, without dropout."""
    settings, form, _ = KINDS[name]
    encoder = EncoderSettings.model_validate({"model": str(folder), "pooling": "cls", "form": form})
    towers = load_towers(encoder, folder, "a" * 64, dropout=0.0)
    _spread(towers.query.transformer)
    if lora:
        add_adapter(towers.query.transformer, LoraSettings(rank=4))
    return build_objective(TypeAdapter(ObjectiveSettings).validate_python(settings), towers)


def _spread(transformer: nn.Module) -> None:
    """Weights as far from zero as those of a trained model: fresh ones give all texts nearly the same vector."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def make_rows(name: str, number: int, size: int = 16) -> pa.Table:
    """Stored batch ``number`` for the objective ``name``."""
    rows: pa.Table = KINDS[name][2](number, size)
    return rows
