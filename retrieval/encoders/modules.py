"""What an encoder's folder says of it: the modules that sentence-transformers chains, in its older and newer layouts.

A plain Hugging Face folder is a transformer alone.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.specification import Pooling, Role
from retrieval.encoders.vector_form import FORM_FILE

DOCUMENT_MODEL_FILE = "document_model.json"  # beside the modules of an encoder of queries alone
SCORING_FILE = "scoring.json"  # beside the modules of an encoder of queries that was trained with a scoring module
CONTEXTUAL_FILE = "contextual.json"  # beside the modules of a contextual encoder's second stage
FIRST_STAGE = "first_stage"  # the folder of its first stage there
CONTEXTUAL_TRANSFORMER = "ContextualTransformer"  # a contextual encoder's, in place of transformer and pooling
LAYER_POOLING = "WeightedLayerPooling"  # of sentence-transformers: documents that average several layers

_CHAIN = re.compile("Transformer( Pooling)?( Dense)*( Normalize)?")
_POOLING_MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}
_WEIGHTS = "model.safetensors"
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_TASK = "feature-extraction"
_TRANSFORMER_SETTINGS = {
    "max_seq_length",
    "do_lower_case",
    "query_length",
    "document_length",
    "transformer_task",
    "modality_config",
    "module_output_name",
    "unpad_inputs",
}


@dataclass(frozen=True)
class ModuleSettings:
    """The modules of a folder and what it says of prompts and length; None where it says nothing."""

    transformer: Path
    pooling: Path | None
    dense: tuple[Path, ...]
    normalize: bool
    query_prompt: str | None
    document_prompt: str | None
    max_lengths: frozenset[int]  # of queries, of documents: usually one
    lower_case: bool


def read_modules(path: Path, role: Role = "document") -> ModuleSettings:
    """Reads the settings of a folder, of its route for ``role`` where it has several.

    Raises ``UserError`` for modules, or an order of them, that aren't supported.
    """
    chain = _read_chain(path, role)
    folders: dict[str, list[Path]] = {}
    for kind, folder in chain:
        folders.setdefault(kind, []).append(folder)
    transformer = folders.get("Transformer", [path])[0]
    prompts = _read_prompts(path / "config_sentence_transformers.json")
    settings = _read_transformer_settings(transformer)
    general = settings.get("max_seq_length")
    lengths: list[int | None] = [settings.get(key) or general for key in ("query_length", "document_length")]
    return ModuleSettings(
        transformer=transformer,
        pooling=folders.get("Pooling", [None])[0],
        dense=tuple(folders.get("Dense", [])),
        normalize="Normalize" in folders,
        query_prompt=prompts.get("query"),
        document_prompt=next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), None),
        max_lengths=frozenset(length for length in lengths if length),
        lower_case=bool(settings.get("do_lower_case")),
    )


def has_two_towers(path: Path) -> bool:
    """Whether the folder encodes queries and documents by different modules.

    One transformer of which documents have several layers or tokens, as the form beside it says, is one tower.
    """
    query, document = read_modules(path, "query"), read_modules(path, "document")
    return query.transformer != document.transformer or (query != document and not (path / FORM_FILE).exists())


def _read_prompts(path: Path) -> dict[str, str]:
    config = read_json(path)
    if config.get("truncate_dim"):
        raise UserError(f"{path} cuts vectors at dimension {config['truncate_dim']} (truncate_dim): not supported.")
    prompts: dict[str, str] = config.get("prompts") or {}
    return prompts


def _read_transformer_settings(folder: Path) -> dict[str, Any]:
    """The Transformer module's settings; raises ``UserError`` for those that would change vectors unseen."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / "sentence_bert_config.json")
    settings: dict[str, Any] = read_json(path)
    if set(settings.get("modality_config") or ["text"]) != {"text"}:
        raise UserError(
            f"{path} has modality_config for other things than text: texts would pass through a chat template, which is"
            " not supported. Save the model with the modality 'text' alone."
        )
    unknown = [key for key, value in settings.items() if value and key not in _TRANSFORMER_SETTINGS]
    if unknown or settings.get("transformer_task", _TASK) != _TASK:
        raise UserError(
            f"{path} sets {', '.join(unknown) or 'transformer_task'}, which is not supported. Supported:"
            f" {', '.join(sorted(_TRANSFORMER_SETTINGS))} (transformer_task {_TASK} only)."
        )
    return settings


def _read_chain(path: Path, role: Role) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in order; nothing for a plain transformer."""
    listing = path / "modules.json"
    if not listing.exists():
        return []
    modules = read_json(listing)
    try:
        found = [(_kind(module["type"]), path / module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{listing} is no list of modules with 'type' and 'path'. Is the encoder's folder whole?"
        ) from error
    chain = [each for kind, folder in found for each in _routed(kind, folder, role)]
    if (path / FORM_FILE).exists():  # which says what the module does
        chain = [(kind, folder) for kind, folder in chain if kind != LAYER_POOLING]
    kinds = " ".join(kind for kind, _ in chain)
    if not _CHAIN.fullmatch(kinds):
        raise UserError(
            f"{listing} chains {kinds!r}, which is not supported. Supported, in this order: Transformer, Pooling (mean,"
            " cls, last token), any number of Dense, Normalize."
        )
    return chain


def _routed(kind: str, folder: Path, role: Role) -> list[tuple[str, Path]]:
    """The module itself; of a Router the modules of the route for ``role``."""
    if kind == CONTEXTUAL_TRANSFORMER:
        return [("Transformer", folder), ("Pooling", folder / "1_Pooling")]
    if kind not in ("Router", "Asym"):
        return [(kind, folder)]
    listing = folder / "router_config.json"
    listing = listing if listing.exists() else folder / "config.json"
    config = read_json(listing)
    try:
        types, routes, mappings = config["types"], config["structure"], config["parameters"].get("route_mappings")
        if role not in routes or mappings:
            raise UserError(
                f"{listing} has the routes {', '.join(sorted(routes))}{' with route_mappings' if mappings else ''}."
                " Supported are the routes query and document without mappings."
            )
        return [(_kind(types[name]), folder / name) for name in routes[role]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{listing} is no listing of routes (types, structure, parameters). Is the encoder's folder whole?"
        ) from error


def _kind(module_type: Any) -> str:
    return str(module_type).rsplit(".", 1)[-1]


def read_pooling(folder: Path | None, path: Path) -> Pooling:
    """The pooling that a Pooling module's ``folder`` names. Raises ``UserError`` for none and for another one."""
    if folder is None:
        raise UserError(
            f"{path} is a plain transformer without pooling settings. Say which pooling it was trained with: set the"
            " encoder's pooling to mean, cls or last_token."
        )
    modes = _pooling_modes(read_json(folder / "config.json"))
    if len(modes) == 1 and modes[0] in _POOLING_MODES:
        return _POOLING_MODES[modes[0]]
    raise UserError(
        f"{folder}/config.json asks for {'several poolings at once' if len(modes) > 1 else 'a pooling'} that is not"
        f" supported: {', '.join(modes)}. Supported is one of mean, cls, lasttoken; set the encoder's pooling to use"
        " another than the folder says."
    )


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    named = config.get("pooling_mode")
    if named is not None:
        return [named] if isinstance(named, str) else list(named)
    older = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    return [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in older]


def pools_prompt(folder: Path | None) -> bool:
    """Whether the prompt's tokens take part in the pooling, as nearly everywhere."""
    return folder is None or read_json(folder / "config.json").get("include_prompt") is not False


class DenseLayer(nn.Module):
    """A linear map after pooling, with the activation its folder names."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        """(n, in) to (n, out) in float32, or in float64 where the weights are; computed in the weights' precision."""
        mapped: Tensor = self.activation(self.linear(vectors.to(self.linear.weight.dtype)))
        return at_least_float32(mapped)


def load_dense(path: Path) -> DenseLayer:
    """The layer in a Dense module's folder. Raises ``UserError`` for what a ``DenseLayer`` can't do."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_json(path / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _ACTIVATIONS:
        raise UserError(f"{path}/config.json names activation {activation!r}; supported: {', '.join(_ACTIVATIONS)}.")
    reads = [config.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")]
    if config.get("use_residual") or reads != ["sentence_embedding"] * 2:
        raise UserError(f"{path}/config.json asks for a residual connection, or maps tokens; neither is supported.")
    try:
        linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True)))
        weights = load_file(safe_weights(path, _WEIGHTS))
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"The Dense layer in {path} can't be loaded from config.json and {_WEIGHTS}: {' '.join(str(error).split())}"
        ) from error
    return DenseLayer(linear, _ACTIVATIONS[activation]())


def safe_weights(folder: Path, name: str) -> Path:
    """The file ``name`` of ``folder``. Raises ``UserError`` where there are only pickles, which may run any code."""
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    if pickles and not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds its weights as a pickle alone ({pickles[0].name}), which isn't read: it can run any code."
            " Where you trust its origin, load it yourself and save it as safetensors (save_pretrained does)."
        )
    return folder / name


def load_weights(weights: Mapping[str, Tensor], path: Path, what: str, listing: str, form: str) -> None:
    """Reads the safetensors file ``path`` into ``weights``, in place.

    ``what``: the file's contents, for the user; ``listing``: the file beside it that has the ``form`` they are of.
    Raises ``UserError`` where it can't be read, or holds others.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{what} {path} can't be read: {error}") from error
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != {name: tuple(value.shape) for name, value in found.items()}:
        raise UserError(
            f"{path} holds {', '.join(sorted(found)) or 'nothing'}, but the form in {listing} beside it asks for"
            f" {', '.join(sorted(weights))}: by name or by shape, other weights than the form's ({form}). Do the files"
            " belong together?"
        )
    with torch.no_grad():
        for name, value in weights.items():
            value.copy_(found[name])


def read_json(path: Path) -> Any:
    """The file's value, an empty mapping where it is absent. Raises ``UserError`` where it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON ({error}). Is the encoder's folder whole?") from error


def read_document_model(path: Path) -> str | None:
    """Of an encoder of queries alone, the ``fingerprint`` of the contract of its documents' encoder; else None."""
    listing = path / DOCUMENT_MODEL_FILE
    if not listing.exists():
        return None
    found = read_json(listing).get("document_model")
    if not isinstance(found, str):
        raise UserError(f"{listing} names no encoder of documents. Export the encoder again.")
    return found
