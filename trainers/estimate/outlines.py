"""Models as their configurations describe them, without weights and without a tokenizer.

They are loaded by the code that loads real ones: transformers alone is given other means, weights that are fake and
tokenizers that count.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from raytriever.artifacts.hub_mirror import mirrored
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, read_yaml
from retrieval.encoders import dense, text_encoder, transformer
from retrieval.encoders.pretrained import PINNED_REVISIONS, LocatedModel
from trainers.estimate.costs import Calibration
from trainers.rehearsal.models import HUB_MODELS, write_modules

_WORD, _END = 2, 1  # ids


class CountingTokenizer:
    """Stands in for a tokenizer: as many tokens as a text has words, or more where they are long, between two others.

    A text of N tokens is N short words.
    """

    pad_token = eos_token = "</s>"
    pad_token_id = eos_token_id = _END
    all_special_ids = (_END,)
    model_max_length = 10**9
    name_or_path = truncation_side = ""
    backend_tokenizer = SimpleNamespace(normalizer=None)

    def __len__(self) -> int:
        return 1

    def num_special_tokens_to_add(self) -> int:
        """Around a text."""
        return 2

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """``input_ids``, and where tensors are asked for, padded ones with their ``attention_mask``."""
        ends = [_END] * add_special_tokens
        several = [texts] if isinstance(texts, str) else texts
        ids = [[*ends, *[_WORD] * number_of_tokens(text), *ends][:max_length] for text in several]
        if return_tensors is None:
            return {"input_ids": ids[0] if isinstance(texts, str) else ids}
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return {"input_ids": mask * _WORD, "attention_mask": mask}


def number_of_tokens(text: str) -> int:
    """About how many a tokenizer makes of a text."""
    return max(len(text.split()), round(len(text.encode()) / Calibration.bytes_per_token))


def text_of(tokens: int, number: int) -> str:
    """A text of so many tokens, another one for each ``number``."""
    return " ".join([str(number), *["the"] * (tokens - 1)])


@contextmanager
def without_weights(fake: FakeTensorMode) -> Iterator[None]:
    """Models that are loaded in it have the weights of their configuration, fake ones, and tokenizers that count."""

    def model(cls: Any, _: Any, *, config: Any, attn_implementation: str = "sdpa", **__: Any) -> Any:
        made = cls._from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        return made, {"missing_keys": []}

    def load_layers(folders: Sequence[Path]) -> tuple[list[nn.Module], int | None]:
        with unset_fake_temporarily():  # fake tensors can't be read of a file
            layers, kept = dense.load_layers(folders)
            return [_replace_tensors(layer, fake.from_tensor) for layer in layers], kept

    from transformers import AutoTokenizer, PreTrainedModel

    with (
        patch.object(PreTrainedModel, "from_pretrained", classmethod(cast(Any, model))),
        patch.object(AutoTokenizer, "from_pretrained", lambda *_, **__: CountingTokenizer()),
        patch.object(transformer, "require_tokenizer", lambda _: None),
        patch.object(transformer, "compare_with_file", lambda *_: None),
        patch.object(text_encoder, "find_tokenizer", Path),
        patch.object(text_encoder, "load_layers", load_layers),
        patch.object(nn.Module, "_apply", _replace_tensors),
        patch.object(FakeTensor, "__deepcopy__", _copied, create=True),
        fake,
    ):
        yield


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """PyTorch's own way looks for a tensor's address."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    found: Tensor = memo[id(tensor)]
    return found


def _replace_tensors(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for fake parameters, whose data can't be swapped."""
    for child in module.children() if recurse else ():
        _replace_tensors(child, change)
    for name, parameter in module._parameters.items():
        if parameter is not None and (new := change(held := parameter.detach())) is not held:
            module._parameters[name] = nn.Parameter(new, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def outline(model: str, revision: str | None = None) -> LocatedModel:
    """Where the model's configuration is: in its folder, in the hub's mirror or cache, or as published.

    Raises ``UserError`` where it is nowhere.
    """
    from huggingface_hub import try_to_load_from_cache

    path = Path(model) if Path(model).is_dir() else None
    if path is None and model.count("/") == 1:
        path = mirrored("models", model)
        if path is None:
            cached = try_to_load_from_cache(model, "config.json", revision=revision or PINNED_REVISIONS.get(model))
            path = Path(cached).parent if isinstance(cached, str) else None
    if path is None or not any(path.rglob("config.json")):
        path = _published(model)
    return LocatedModel(path, "its configuration", "0" * 64)


@cache
def published() -> Mapping[str, Any]:
    """The table of published models and collections."""
    path = Path(__file__).with_name("published.yaml")
    return read_yaml(path, str(path))


@cache
def _published_configurations() -> tempfile.TemporaryDirectory[str]:
    """Where they are written to, until the process ends."""
    return tempfile.TemporaryDirectory()


def _published(model: str) -> Path:
    if model not in HUB_MODELS:
        raise UserError(
            f"How the model {model!r} is built isn't known here: it is no folder, not in the hub's cache or mirror, and"
            f" none of those whose sizes come along ({', '.join(HUB_MODELS)}).{did_you_mean(model, list(HUB_MODELS))}"
            f" Name a folder that holds its config.json, or fetch that once: hf download {model} config.json."
        )
    known = HUB_MODELS[model]
    values = published()["families"][known.family] | published()["models"].get(model, {})
    place = Path(_published_configurations().name, model)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(values))
    if known.pooling is not None:
        write_modules(known, place, values.get("d_model") or values.get("hidden_size") or 768)
    return place
