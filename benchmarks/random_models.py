"""Training runs with random weights on made-up batches, of every objective: what ``benchmarks.gpu_check`` runs.

Models are built from their configurations alone and a word is a token, as in ``raytriever estimate``; here the weights
are real, and on a device.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainers.engine.callback import Callback
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.estimate.made_up import MadeUpBatches, Shape, outlined_objective
from trainers.objective import Objective
from trainers.run_settings import RunSettings
from trainers.training_run import place

_TRIPLETS = {"hard_negatives": 1}
_LAYERS = {"kind": "layers", "layers": [1, 2]}
# name: the objective, what its batches have besides, other settings of the run. "llama" is the larger model
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "contrastive": ({"kind": "contrastive"}, _TRIPLETS, {}),
    "contrastive, gradient cache": ({"kind": "contrastive", "gradient_cache": True}, _TRIPLETS, {}),
    "contrastive, Llama with LoRA": ({"kind": "contrastive"}, {"rows": 32}, {"model": "llama", "lora": {"rank": 16}}),
    "adaptive_margin": ({"kind": "adaptive_margin"}, _TRIPLETS, {}),
    "margin_mse": ({"kind": "margin_mse"}, _TRIPLETS, {}),
    "multi_layer": ({"kind": "multi_layer", "training_form": "multi_vector"}, {}, {"form": _LAYERS}),
    "contextual": ({"kind": "contextual", "context_documents": 8}, {}, {}),
    "coder": ({"kind": "coder", "documents": "none"}, {"candidates": 50}, {}),
    "replug": ({"kind": "replug", "scores": "none"}, {"rows": 16}, {}),
    "revela": ({"kind": "revela", "language_model": {"model": "llama"}}, {"rows": 16}, {}),
}


@dataclass(frozen=True)
class Models:
    """Configurations by the names of transformers, and what batches are like at most."""

    bert: Mapping[str, Any]
    llama: Mapping[str, Any]
    shape: Shape


REAL = Models(
    {"model_type": "bert"},
    {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    Shape(64, 16, 128),
)  # fmt: skip
_TINY = {
    "vocab_size": 1000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = Models({"model_type": "bert"} | _TINY, {"model_type": "llama"} | _TINY, Shape(8, 8, 20))


def run_settings(name: str, models: Models, folder: Path, **training: Any) -> tuple[RunSettings, Shape]:
    """Those of an objective, and what its batches are like. ``folder``: for the configurations."""
    objective, special, others = OBJECTIVES[name]
    for model in ("bert", "llama"):
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(dict(getattr(models, model))))
    if "language_model" in objective:
        objective = objective | {"language_model": {"model": str(folder / "llama")}}
    encoder = {"model": str(folder / others.get("model", "bert")), "pooling": "mean", "form": others.get("form")}
    values = {"batches": "none", "encoder": encoder, "objective": objective, "lora": others.get("lora")}
    values["training"] = {"schedule": {"kind": "constant"}, **training}
    most = models.shape.rows
    shape = replace(models.shape, **special | {"rows": min(most, special.get("rows", most))})
    return RunSettings.model_validate(values), shape


def random_objective(settings: RunSettings, shape: Shape, device: torch.device) -> Objective[Any]:
    """What the settings train, with the same weights whenever it is asked for."""
    torch.manual_seed(0)
    return place(outlined_objective(settings, shape), settings, device)


class _TimeIsUp(Exception):
    pass


class _Watching(Callback):
    def __init__(self, until: float) -> None:
        self.points: list[dict[str, Any]] = []
        self._until = until

    def on_step(self, point: Mapping[str, Any]) -> None:
        self.points.append(dict(point))
        if time.monotonic() > self._until:
            raise _TimeIsUp


def train_steps(
    objective: Objective[Any],
    settings: RunSettings,
    shape: Shape,
    steps: int,
    checkpoints: Checkpoints | None = None,
    until: float = float("inf"),
) -> list[dict[str, Any]]:
    """What each step reported; fewer than ``steps`` where ``time.monotonic`` passed ``until``.

    Batches differ, the same ones in every run whose settings say so.
    """
    training = settings.training.model_copy(update={"max_steps": steps})
    batches = MadeUpBatches(shape, 1000, settings.objective)
    watching = _Watching(until)
    with suppress(_TimeIsUp):
        train(objective, batches, training, checkpoints=checkpoints, callbacks=[watching])
    return watching.points
