"""Models as their configurations describe them, without weights, and with tokenizers of one token a word.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from raytriever.artifacts.object_store import mirrored
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from retrieval.encoders.pretrained import PINNED_REVISIONS, LocatedModel
from retrieval.encoders.transformer import OUTLINED
from trainers.rehearsal.models import hub_models, published_configuration, write_modules

_END, _UNKNOWN = "</s>", "[UNK]"
_WORDS = 300  # that texts are made of
_OF_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model")


def text_of(tokens: int, number: int) -> str:
    """A text of so many tokens, another one for each ``number``."""
    return " ".join([str(number), *[str(number % _WORDS)] * (tokens - 1)])


@contextmanager
def without_weights(device: str) -> Iterator[None]:
    """Models that are loaded in it are made of their configurations: on the device ``meta`` without any numbers."""
    token = OUTLINED.set(torch.device(device))
    try:
        yield
    finally:
        OUTLINED.reset(token)


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Puts fake weights of the CPU in the place of a module's own, those that are shared once."""
    made: dict[int, Tensor] = {}
    for each in module.modules():
        own: list[dict[str, Any]] = [each._parameters, each._buffers]
        for held in own:
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                held[name] = tensor if tensor is None else made[id(tensor)]


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
    if model not in hub_models():
        raise UserError(
            f"The sizes of the model {model!r} are unknown. It is no folder, it is not in the hub's cache or mirror,"
            f" and its sizes don't come with Raytriever.{did_you_mean(model, list(hub_models()))} Name a folder that"
            f" holds its config.json, run the recipe that trains it, or fetch it: hf download {model} config.json."
        )
    values = published_configuration(model)
    (place / "config.json").write_text(json.dumps(values))
    if modules := hub_models()[model].get("modules"):
        write_modules(modules, place, values.get("d_model") or values.get("hidden_size") or 768)


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that makes each word one token, between two special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([_END, _UNKNOWN, *map(str, range(_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{_END} $A {_END}", special_tokens=[(_END, 0)])
    kept = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        unk_token=_UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )
    kept.save_pretrained(folder)
