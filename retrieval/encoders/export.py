"""Writes an encoder as a sentence-transformers folder in the layout that every release from 2 to 6 loads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytriever.retrieval.encoders.specification import Pooling

if TYPE_CHECKING:
    from raytriever.retrieval.encoders.text_encoder import TextEncoder

_POOLING_MODES: dict[str, Pooling | None] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": None,
    "mean_sqrt_len_tokens": None,
    "weightedmean_tokens": None,
    "lasttoken": "last_token",
}
_MODULES = "sentence_transformers.models"
# where the tokenizer was loaded from, settings of single calls that it was once saved with, and those that would
# replace the special tokens that its tokenizer.json puts around a text
_NOT_EXPORTED = {
    "add_bos_token",
    "add_eos_token",
    "name_or_path",
    "is_local",
    "local_files_only",
    "max_length",
    "stride",
    "truncation_side",
    "truncation_strategy",
    "pad_to_multiple_of",
}


def write_sentence_transformers_folder(encoder: "TextEncoder", folder: Path) -> None:
    """Writes weights, tokenizer, pooling, dense layers, both prompts and the length limit to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    contract = encoder.contract
    encoder.transformer.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
    _write_tokenizer(encoder.tokenizer, folder)
    modules = ["Transformer", "Pooling", *["Dense"] * len(encoder.dense), *["Normalize"] * contract.normalize]
    names = ["", *(f"{number}_{module}" for number, module in enumerate(modules[1:], start=1))]
    _write(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": name, "type": f"{_MODULES}.{module}"}
            for number, (module, name) in enumerate(zip(modules, names, strict=True))
        ],
    )
    _write(folder / "sentence_bert_config.json", {"max_seq_length": contract.max_length, "do_lower_case": False})
    _write(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": contract.query_prompt, "document": contract.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if contract.normalize else "dot",
        },
    )
    hidden = encoder.transformer.config.hidden_size  # type: ignore[union-attr]
    pooling: dict[str, Any] = {"word_embedding_dimension": hidden}
    pooling |= {f"pooling_mode_{name}": mode == contract.pooling for name, mode in _POOLING_MODES.items()}
    _write(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": True})
    for number, layer in enumerate(encoder.dense, start=2):
        _write_dense(layer, folder / f"{number}_Dense")


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    # a tokenizer remembers the truncation of its last call, and would carry it into the folder
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # The class that both transformers 4 and 5 know for any tokenizer.json
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write(path, {key: value for key, value in config.items() if key not in _NOT_EXPORTED})


def _write_dense(layer: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    linear = layer.linear
    activation = type(layer.activation)
    _write(
        folder / "config.json",
        {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
        },
    )
    weights = {f"linear.{name}": value.contiguous() for name, value in linear.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
