"""Writes an encoder as a sentence-transformers folder in the layout that every release from 2 to 6 loads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from retrieval.encoders.adapter import merged_weights
from retrieval.encoders.dense import cut, width_behind
from retrieval.encoders.modules import (
    CONTEXTUAL_FILE,
    DOCUMENT_MODEL_FILE,
    FORM_FILE,
    LAYER_POOLING,
    POOLING_MODES,
    SCORING_FILE,
    TABLE,
    read_json,
    write_json,
)
from retrieval.encoders.specification import EncoderContract, Pooling, Role, VectorForm
from retrieval.encoders.static import TABLE as TABLE_FILE
from retrieval.encoders.static import TokenTable

_Chain = list[tuple[str, Callable[[Path], None]]]

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


class EncoderParts(NamedTuple):
    """The modules of a folder. ``dense`` are ``DenseLayer``, in their order after the pooling."""

    transformer: nn.Module
    tokenizer: Any
    dense: Sequence[nn.Module]
    contract: EncoderContract


def write_sentence_transformers_folder(encoder: EncoderParts, folder: Path) -> None:
    """Writes weights, tokenizer, pooling, dense layers, prompts and the length limit to ``folder``."""
    _begin(folder)
    listing = []
    for number, (kind, write) in enumerate(_modules(encoder, encoder.contract.pooling)):
        name = f"{number}_{kind}" if number else ""  # the transformer's files are in the folder itself
        write(folder / name)
        listing.append({"idx": number, "name": str(number), "path": name, "type": f"{_MODULES}.{kind}"})
    write_json(folder / "modules.json", listing)
    _write_prompts(encoder, folder)
    if encoder.contract.document_model is not None:
        write_json(folder / DOCUMENT_MODEL_FILE, {"document_model": encoder.contract.document_model})


def write_routes(
    query: EncoderParts,
    document: EncoderParts,
    folder: Path,
    document_pooling: Pooling,
    layer_weights: Mapping[int, float] | None = None,
) -> None:
    """Writes a Router, which takes queries through ``query``'s modules and documents through ``document``'s.

    A shared transformer is written once. ``document_pooling`` replaces the encoder's own. ``layer_weights``, by layer,
    are for documents that pool a weighted average of layers. sentence-transformers reads it from release 5. Averages of
    ModernBERT differ over transformers 4, which leaves its final norm out of ``hidden_states``.
    """
    _begin(folder)
    types: dict[str, str] = {}
    routes: dict[Role, list[str]] = {"query": [], "document": []}
    chains: dict[Role, _Chain] = {
        "query": _modules(query, query.contract.pooling),
        "document": _modules(document, document_pooling, layer_weights),
    }
    for role, chain in chains.items():
        for number, (kind, write) in enumerate(chain):
            is_shared = role == "document" and number == 0 and document.transformer is query.transformer
            name = routes["query"][0] if is_shared else f"{role}_{number}_{kind}"
            routes[role].append(name)
            if not is_shared:
                write(folder / name)
                types[name] = f"{_MODULES}.{kind}"
    if layer_weights is not None:
        config = folder / routes["document"][0] / "config.json"
        write_json(config, read_json(config) | {"output_hidden_states": True})
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": routes, "parameters": parameters})
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}.Router"}])
    _write_prompts(query, folder)


def write_form(form: VectorForm, alpha: Sequence[float] | None, folder: Path) -> None:
    """Writes which vectors documents have beside the modules; ``alpha``: the scalar mix's, else None."""
    write_json(folder / FORM_FILE, form.model_dump(mode="json") | ({} if alpha is None else {"alpha": list(alpha)}))


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FORM_FILE, DOCUMENT_MODEL_FILE, CONTEXTUAL_FILE, SCORING_FILE):
        (folder / name).unlink(missing_ok=True)  # of an encoder that was there before


def _modules(encoder: EncoderParts, pooling: Pooling, layer_weights: Mapping[int, float] | None = None) -> _Chain:
    """Kind of each module, in their order, and what writes its folder."""
    config: Any = encoder.transformer.config
    if isinstance(encoder.transformer, TokenTable):
        chain: _Chain = [(TABLE, partial(_write_table, encoder))]
        return [*chain, *_behind(encoder)]
    chain = [("Transformer", partial(_write_transformer, encoder))]
    if layer_weights is not None:
        chain.append((LAYER_POOLING, partial(_write_layer_pooling, config, layer_weights)))
    chain.append(("Pooling", partial(_write_pooling, config.hidden_size, pooling)))
    return [*chain, *_behind(encoder)]


def _behind(encoder: EncoderParts) -> _Chain:
    chain: _Chain = [("Dense", partial(_write_dense, layer)) for layer in encoder.dense]
    if not encoder.contract.normalize:
        return chain
    width, kept = width_behind(encoder.transformer, encoder.dense), encoder.contract.dimension
    if kept < width:  # sentence-transformers' own truncate_dim cuts behind the normalisation, which leaves them short
        chain.append(("Dense", partial(_write_dense, cut(width, kept))))
    return [*chain, ("Normalize", lambda _: None)]


def _write_table(encoder: EncoderParts, folder: Path) -> None:
    table: Any = encoder.transformer
    folder.mkdir(exist_ok=True)
    save_file({"embedding.weight": table.embedding.weight.detach().contiguous()}, folder / TABLE_FILE)
    tokenizer = encoder.tokenizer.backend_tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(encoder.contract.max_length)  # which is read by whoever loads the file
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_prompts(encoder: EncoderParts, folder: Path) -> None:
    contract, width = encoder.contract, width_behind(encoder.transformer, encoder.dense)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": contract.named_prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if contract.normalize else "dot",
        }
        | ({"truncate_dim": contract.dimension} if contract.dimension < width and not contract.normalize else {}),
    )


def _write_transformer(encoder: EncoderParts, folder: Path) -> None:
    weights = merged_weights(encoder.transformer)
    encoder.transformer.save_pretrained(folder, state_dict=weights, safe_serialization=True)  # type: ignore[operator]
    _write_tokenizer(encoder.tokenizer, folder)
    length = {"max_seq_length": encoder.contract.max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", length)


def _write_pooling(width: int, wanted: Pooling, folder: Path) -> None:
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    for name, mode in POOLING_MODES.items():
        token = "_token" if name == "cls" else "_tokens" if name in ("mean", "max", "weightedmean") else ""
        pooling[f"pooling_mode_{name}{token}"] = mode == wanted
    write_json(folder / "config.json", pooling)


def _write_layer_pooling(config: Any, weights: Mapping[int, float], folder: Path) -> None:
    first, count = min(weights), config.num_hidden_layers
    settings = {"word_embedding_dimension": config.hidden_size, "layer_start": first, "num_hidden_layers": count}
    write_json(folder / "config.json", settings)
    values = torch.tensor([weights.get(layer, 0.0) for layer in range(first, count + 1)])
    save_file({"layer_weights": values}, folder / "model.safetensors")


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    # a tokenizer remembers the truncation of its last call, and would carry it into the folder
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    # The class that both transformers 4 and 5 know for any tokenizer.json
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]  # some models refuse token types, which are all 0
    write_json(path, {key: value for key, value in config.items() if key not in _NOT_EXPORTED})


def _write_dense(layer: Any, folder: Path) -> None:
    linear = layer.linear
    activation = type(layer.activation)
    write_json(
        folder / "config.json",
        {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
        },
    )
    # not by state_dict: a layer whose weights are shared out over ranks gives only its own part there, even while whole
    weights = {f"linear.{name}": value.detach().contiguous() for name, value in linear.named_parameters()}
    save_file(weights, folder / "model.safetensors")
