"""LoRA adapters: trained inside a transformer and exported as part of its weights, or read as PEFT saves them.

A saved adapter is a small folder that names the base model it belongs to.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.modules import ADAPTER_CONFIG, read_json, require_safetensors
from retrieval.encoders.specification import LoraSettings

_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)


def add_adapter(transformer: nn.Module, settings: LoraSettings, seed: int = 0) -> nn.Module:
    """``transformer`` itself, frozen, with LoRA in it: float32 matrices that alone are trained.

    Their first values depend on ``seed`` alone. Raises ``UserError`` where targets match no module.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),  # any number will do
        lora_dropout=settings.dropout,
        target_modules=_targets(transformer, settings.targets),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, transformer, _NAME)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return transformer


def _targets(transformer: nn.Module, wanted: list[str] | str) -> list[str]:
    """Full names of the modules that get an adapter."""
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    inner = [name for name in linear if re.search(r"\.\d+\.", name)]  # of the blocks: no pooler, no projection
    if isinstance(wanted, list):
        chosen = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in wanted}
    elif wanted == "attention":
        chosen = {wanted: [name for name in inner if _ATTENTION.search(name)]}
    else:
        chosen = {wanted: inner}
    missing = [target for target, names in chosen.items() if not names]
    if missing or not chosen:
        ends = sorted({re.split(r"(?:^|\.)\d+\.", name)[-1] for name in linear})
        raise UserError(
            f"lora.targets {', '.join(map(repr, missing)) or 'is empty and'} names no linear module of"
            f" {type(transformer).__name__}. Its modules, in its blocks and outside them: {', '.join(ends)}. Name"
            " those, or the ends of their names, or set targets to 'all_linear'."
        )
    return sorted({name for names in chosen.values() for name in names})


@torch.no_grad()
def merged_weights(transformer: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names they have without LoRA, each adapter added to its matrix.

    ``transformer`` stays as it is and can be trained on. Where its weights are shared out over ranks, ask for them
    while they are whole.
    """
    from peft.tuners.lora import LoraLayer

    adapted = {name: module for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    weights = {}
    for owner, name, tensor in _tensors(transformer):
        parts = owner.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        base = parts[-1] == "base_layer" and owner.removesuffix(".base_layer") in adapted
        if base:
            owner = owner.removesuffix(".base_layer")
        if base and name == "weight":
            delta: Tensor = adapted[owner].get_delta_weight(_NAME)
            tensor = (tensor + delta.to(tensor.device)).to(tensor.dtype)
        weights[f"{owner}.{name}" if owner else name] = tensor.detach()
    return weights


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(owner's name, name, tensor) of everything that ``state_dict`` holds, aliases too."""
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        held: dict[str, Any] = {**owner._parameters, **owner._buffers}
        for name, tensor in held.items():
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield owner_name, name, tensor


def merge_adapter(base: nn.Module, folder: Path) -> nn.Module:
    """``base`` with the LoRA weights in ``folder`` added to its own; trainable is what was trainable before.

    Raises ``UserError`` for another kind of adapter, for pickled weights, and where weights and base don't fit.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    trainable = {name for name, parameter in base.named_parameters() if parameter.requires_grad}
    require_safetensors(folder)
    kind = read_json(folder / ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{folder / ADAPTER_CONFIG} is an adapter of kind {kind}. Only LORA is supported.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / _WEIGHTS)
        with catch_warnings(action="ignore", category=FutureWarning):  # PEFT asks by a name of earlier transformers
            model = PeftModel(base, config)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"The LoRA adapter in {folder} can't be loaded: {' '.join(str(error).split())}") from error
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    # an adapter of a model with a language-modelling head has one more 'model.' in front of the same names
    weights = {
        name if name in expected else name.replace(".model.model.", ".model.", 1): w for name, w in weights.items()
    }
    unmatched = sorted(expected.keys() ^ weights.keys())
    unmatched += [name for name, value in weights.items() if name in expected and expected[name].shape != value.shape]
    if unmatched:
        raise UserError(
            f"The LoRA adapter in {folder} doesn't fit its base model: {len(unmatched)} tensors have no counterpart of"
            f" their shape, the first {unmatched[0]}. Was it trained on another base? Name the right one as base_model."
        )
    set_peft_model_state_dict(model, weights)
    merged: nn.Module = model.merge_and_unload()
    for name, parameter in merged.named_parameters():  # PEFT froze all but its own, which are gone
        parameter.requires_grad_(name in trainable)
    return merged
