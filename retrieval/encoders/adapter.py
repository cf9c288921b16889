"""LoRA adapters as PEFT saves them: a small folder that names the base model it belongs to."""

from pathlib import Path

from torch import nn

from raytriever.retrieval.encoders.modules import read_json, read_modules, safe_weights
from raytriever.retrieval.errors import UserError

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def has_adapter(path: Path) -> bool:
    """Whether the encoder in the folder ``path`` is an adapter rather than a whole model."""
    return (read_modules(path).transformer / _CONFIG).exists()


def named_base(path: Path) -> tuple[str, str | None]:
    """Name and revision of the base model under the adapter at ``path``. Raises ``UserError`` where it names none."""
    listing = read_modules(path).transformer / _CONFIG
    config = read_json(listing)
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"{listing} names no base_model_name_or_path. Say which model the adapter was trained on: set the encoder's"
            " base_model."
        )
    return str(name), config.get("revision")


def merge_adapter(base: nn.Module, folder: Path) -> nn.Module:
    """``base`` with the LoRA weights in ``folder`` added to its own.

    Raises ``UserError`` for another kind of adapter, for pickled weights, and where weights and base don't fit.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, kind = safe_weights(folder, _WEIGHTS), read_json(folder / _CONFIG).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{folder / _CONFIG} is an adapter of kind {kind}; LORA alone is supported.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_file(path)
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
    return merged
