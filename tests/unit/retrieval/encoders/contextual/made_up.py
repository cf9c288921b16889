"""Tiny contextual encoders of every family, with random weights."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import contextual_from
from retrieval.encoders.specification import ContextualForm
from retrieval.encoders.text_encoder import TextEncoder
from tests.unit.retrieval.encoders.tiny_models import SENTENCES, TEXTS, load_tiny, tiny_model

FAMILIES = ("bert", "roberta", "mpnet", "nomic_bert", "modernbert")
saved = tiny_model
BLOCKS = {"prefix_attends": "prefix"}
DOCUMENTS = [*SENTENCES, "another one", "the last"]


@cache
def _loaded(family: str, seed: int, settings: tuple[tuple[str, Any], ...]) -> TextEncoder:
    return load_tiny(saved(family, seed), **dict(settings))


@contextmanager
def module_cache(folder: Path) -> Iterator[None]:
    """Code of model folders is copied there to be run, not into the user's cache, and forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def contextual(
    family: str = "bert", *, dtype: torch.dtype = torch.float64, in_parts: bool = True, **settings: Any
) -> ContextualEncoder:
    """In evaluation, its first stage another model than its second; ``settings``: of its form and of the encoder."""
    form = {name: settings.pop(name) for name in list(settings) if name in ContextualForm.model_fields}
    values = {"pooling": "mean", "normalize": False, "max_length": 24} | settings
    encoder, first = (copy.deepcopy(_loaded(family, seed, tuple(values.items()))) for seed in (0, 1))
    made = contextual_from(encoder, ContextualForm(**({"context_documents": len(DOCUMENTS)} | form)), first)
    made = made.to(dtype).eval()
    if not in_parts:
        for layer in made._backbone.layers:
            layer.forward = layer.forward
    assert made._backbone.in_parts == in_parts
    return made


def features(encoder: ContextualEncoder, texts: list[str] = TEXTS) -> dict[str, Tensor]:
    return encoder.tokenize(texts, "document")


def masks(count: int, slots: int, seed: int = 0, probability: float = 0.3) -> Tensor:
    return torch.rand(count, slots, generator=torch.Generator().manual_seed(seed)) < probability
