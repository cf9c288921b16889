"""Every kind of objective over a tiny encoder, and stored batches for it. A further kind is one line of ``KINDS``."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.pretrained import LocatedModel, locate_model
from retrieval.encoders.specification import EncoderSettings, LoraSettings
from retrieval.encoders.towers import Towers, load_towers
from tests.unit.pipelines.jobs.batch_inputs import artifact
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.trainers.candidate_batches import candidate_batch, document_values, store_vectors
from tests.unit.trainers.chunk_batches import chunk_table
from tests.unit.trainers.tiny import random_batch
from tests.unit.trainers.triplet_batches import triplet_batch
from trainers.objective import Objective, build_objective
from trainers.objectives.chunk_settings import SCORES
from trainers.objectives.contextual import contextual_encoder
from trainers.objectives.pair_settings import ContextualSettings
from trainers.objectives.replug import score_table
from trainers.run_settings import AnyObjectiveSettings

LAYERS = {"kind": "layers", "layers": [1, 2]}
TOKENS = {"kind": "first_tokens", "tokens": 3}
CODER = {"kind": "coder", "other_encoder": True}
LIST_SCORER = {"kind": "transformer", "layers": 1, "heads": 2, "dropout": 0.0}


def epoch_batch(number: int, size: int) -> pa.Table:
    """A random batch of the first epoch."""
    return random_batch(number, size).append_column("epoch", pa.array([0] * size, pa.int32()))


def scored_batch(number: int, size: int) -> pa.Table:
    """A random batch with random surrogate scores."""
    scores = np.random.default_rng(number).uniform(-0.1, 0.1, (size, size)).astype(np.float32)
    return random_batch(number, size).append_column("surrogate_scores", pa.array(list(scores)))


# name: the objective's settings, the form of a document's vectors, its stored batches
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Any]] = {
    "contrastive": ({"kind": "contrastive"}, None, scored_batch),
    "contrastive, distilled": ({"kind": "contrastive", "distillation": 0.5}, None, scored_batch),
    "contrastive, cached": ({"kind": "contrastive", "chunk_size": 3, "gradient_cache": True}, None, scored_batch),
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
    "revela": ({"kind": "revela", "similarity_temperature": 0.1}, None, chunk_table),
    "revela, again": (
        {"kind": "revela", "similarity_temperature": 0.1, "language_model": {"activation_checkpointing": True}},
        None,
        chunk_table,
    ),
    "revela, frozen": (
        {"kind": "revela", "similarity_temperature": 0.1, "language_model": {"frozen": True}}, None, chunk_table
    ),
    "contextual": ({"kind": "contextual", "context_documents": 6}, None, epoch_batch),
    "contextual, cached": (
        {"kind": "contextual", "context_documents": 6, "chunk_size": 3, "gradient_cache": True}, None, epoch_batch
    ),
    "contextual, prefix": (
        {"kind": "contextual", "context_documents": 6, "prefix_attends": "prefix"}, None, epoch_batch
    ),
    "replug": ({"kind": "replug", "similarity_temperature": 0.1, "likelihood_temperature": 0.5}, None, chunk_table),
    "coder": (CODER, None, candidate_batch),
    "coder, cached": (CODER | {"similarity": "cosine", "chunk_size": 3, "gradient_cache": True}, None, candidate_batch),
    "coder, info_nce": (CODER | {"loss": "info_nce", "negatives": "in_batch"}, None, candidate_batch),
    "coder, max_margin": (CODER | {"loss": "max_margin"}, None, candidate_batch),
    "coder, smoothed": (CODER | {"smoothing": {"neighbours": 5}}, None, candidate_batch),
    "coder, lists": (CODER | {"scoring": LIST_SCORER}, None, candidate_batch),
    "coder, lists alone": (CODER | {"scoring": LIST_SCORER | {"query_encoder": "frozen"}}, None, candidate_batch),
}  # fmt: skip
ALIKE = {
    "contrastive, cached", "adaptive_margin, static", "margin_mse", "multi_layer, tokens", "revela, again",
    "contextual, cached", "coder, cached", "coder, info_nce", "coder, max_margin", "coder, smoothed",
}  # fmt: skip
"""They compute in the dtypes of another kind: of what is said of dtypes the default suite asks the others."""
ONE_OF_EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in KINDS]
_MADE = TemporaryDirectory(prefix="objectives-")  # removed when the process ends
BATCHES = 4  # that have scores


def settings_of(name: str) -> Any:
    """The settings of the objective ``name`` of ``KINDS``."""
    settings = KINDS[name][0]
    if settings["kind"] == "revela":
        settings = settings | {
            "language_model": {"model": str(_language_model().path)} | settings.get("language_model", {})
        }
    if settings["kind"] == "replug":
        settings = settings | {"scores": _scores()}
    if settings["kind"] == "coder":
        settings = settings | {"documents": _vectors()}
    return TypeAdapter(AnyObjectiveSettings).validate_python(settings)


def make_objective(
    name: str,
    folder: Path,
    lora: bool = False,
    dropout: float = 0.0,
    pooling: str = "cls",
    settings: Any = None,
    query_prompt: str = "",
) -> Objective[Any]:
    """The objective ``name`` of ``KINDS``, or of ``settings``, around the encoder in ``folder``, on the CPU."""
    chosen = settings or settings_of(name)
    models = {"objective.language_model": _language_model()} if chosen.kind == "revela" else {}
    towers = deepcopy(_towers(name, folder, dropout, pooling, query_prompt))
    if isinstance(chosen, ContextualSettings):
        encoder = contextual_encoder(towers.query, chosen, None, seed=0)
        towers = Towers(encoder, encoder)
    is_frozen = chosen.kind == "coder" and chosen.scoring.query_encoder == "frozen"
    for transformer in towers.transformers() if lora and not is_frozen else ():
        add_adapter(transformer, LoraSettings(rank=4))
    return build_objective(chosen, towers, models)


@cache
def _towers(name: str, folder: Path, dropout: float, pooling: str, query_prompt: str) -> Towers:
    plain = EncoderSettings(model=str(folder), pooling=pooling, form=KINDS[name][1], query_prompt=query_prompt)
    towers = load_towers(plain, folder, "a" * 64, dropout=dropout)
    _spread(towers.query.transformer)
    return towers


@cache
def _language_model() -> LocatedModel:
    folder = save_tiny_model("qwen2", Path(_MADE.name) / "language-model", language_model=True)
    return locate_model(str(folder))


@cache
def _scores(size: int = 16) -> str:
    """Made-up ones, a file of one epoch."""
    generator, tokens = np.random.default_rng(0), [1 + row % 3 for row in range(size)]
    tables = [score_table(generator.normal(size=(size, size)).astype(np.float32), tokens) for _ in range(BATCHES)]
    shard = {
        "files": {"epoch=00000/scores-00000.parquet": pa.concat_tables(tables)},
        "rows": BATCHES * size,
        "facts": {"epoch": 0, "batches": BATCHES, "batch_size": size},
        "row_group_size": size,
    }
    return artifact(Path(_MADE.name) / "scores", SCORES, {}, {}, [shard])


@cache
def _vectors(width: int = 32) -> str:
    """Of the documents and the queries of the batches of candidates."""
    values = np.tile(document_values(), width)[:, :width]
    queries = [name for number in range(BATCHES) for name in candidate_batch(number, 16)["query_id"].to_pylist()]
    return store_vectors(Path(_MADE.name) / "vectors", values, queries=queries).uri


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
