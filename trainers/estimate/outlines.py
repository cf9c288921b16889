"""Models as their configurations describe them, without weights, and with tokenizers that only stand for real ones.

The code that loads real ones loads them: from a folder that has a configuration, and a tokenizer made here.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import nn

from raytriever.artifacts.object_store import mirrored
from raytriever.errors import UserError
from raytriever.settings.configuration import apply_values, did_you_mean
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.language_model import load_language_model
from retrieval.encoders.pretrained import PINNED_REVISIONS, LocatedModel, named_models
from retrieval.encoders.towers import Towers
from retrieval.encoders.transformer import OUTLINED
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.rehearsal.models import hub_models, published_configuration, write_modules
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training

_END, _UNKNOWN = "</s>", "[UNK]"
_OF_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")


@contextmanager
def without_weights(device: str = "meta") -> Iterator[None]:
    """Models that are loaded in it are made of their configurations: on the device ``meta`` without any numbers."""
    token = OUTLINED.set(torch.device(device))
    try:
        yield
    finally:
        OUTLINED.reset(token)


class OutlinedModels(nn.Module):
    """What a run trains, on the device ``meta``: the encoders, and the language model that it learns from."""

    def __init__(self, towers: Towers, language_model: nn.Module | None) -> None:
        super().__init__()
        self.towers = towers
        self.language_model = language_model


def outlined_models(settings: RunSettings) -> OutlinedModels:
    """Raises ``UserError`` as loading does, and for models of which no configuration is at hand."""
    settings = without_own_tokenizers(settings)
    located = {key: outline(each.model, each.revision) for key, each in named_models(settings).items()}
    with without_weights():
        towers, language_model = load_for_training(settings, located), None
        if isinstance(settings.objective, RevelaSettings):
            wanted = settings.objective.language_model
            language_model, _ = load_language_model(located["objective.language_model"].path)
            if wanted.lora is not None:
                add_adapter(language_model, wanted.lora)
            if wanted.frozen:
                language_model.requires_grad_(False)
    return OutlinedModels(towers, language_model)


def without_own_tokenizers(settings: RunSettings) -> RunSettings:
    """The settings where each model has the tokenizer of its folder."""
    named = named_models(settings)
    own = {f"{key}.tokenizer": None for key, each in named.items() if getattr(each, "tokenizer", None)}
    return type(settings).model_validate(apply_values(settings.model_dump(), own, "estimate"))


@cache
def outline(model: str, revision: str | None = None) -> LocatedModel:
    """A folder with the model's configuration: of its folder, of the hub's mirror or cache, or as published.

    Raises ``UserError`` where it is nowhere.
    """
    place = Path(tempfile.mkdtemp(dir=_outlines().name))
    found = _configuration(model, revision)
    if found is not None:
        ignored = shutil.ignore_patterns(*_OF_TOKENIZERS)
        shutil.copytree(found.resolve(), place, copy_function=os.symlink, ignore=ignored, dirs_exist_ok=True)
    else:
        _write_published(model, place)
    for config in list(place.rglob("config.json")):
        _write_tokenizer(config.parent)
    return LocatedModel(place, "its configuration", "0" * 64)


@cache
def _outlines() -> tempfile.TemporaryDirectory[str]:
    """Where outlines are until the process ends."""
    return tempfile.TemporaryDirectory()


def _configuration(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = Path(model) if Path(model).is_dir() else None
    if path is None and model.count("/") == 1:
        path = mirrored("models", model)
        if path is None:
            cached = try_to_load_from_cache(model, "config.json", revision=revision or PINNED_REVISIONS.get(model))
            path = Path(cached).parent if isinstance(cached, str) else None
    return path if path is not None and any(path.rglob("config.json")) else None


def _write_published(model: str, place: Path) -> None:
    known = list(hub_models())
    if model not in known:
        raise UserError(
            f"How the model {model!r} is built isn't known here: it is no folder, not in the hub's cache or mirror, and"
            f" none of those whose sizes come along ({', '.join(known)}).{did_you_mean(model, known)}"
            f" Name a folder that holds its config.json, or fetch that once: hf download {model} config.json."
        )
    values = published_configuration(model)
    (place / "config.json").write_text(json.dumps(values))
    if modules := hub_models()[model].get("modules"):
        write_modules(modules, place, values.get("d_model") or values.get("hidden_size") or 768)


def _write_tokenizer(folder: Path) -> None:
    """One that puts a token before each text and another behind it."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({_END: 0, _UNKNOWN: 1}, unk_token=_UNKNOWN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{_END} $A {_END}", special_tokens=[(_END, 0)])
    kept = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, unk_token=_UNKNOWN)
    kept.save_pretrained(folder)
