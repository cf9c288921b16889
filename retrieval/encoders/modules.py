"""What an encoder's folder says of it: the modules that sentence-transformers chains, in all layouts that it has had.

A plain Hugging Face folder is a transformer alone. The files are read as sentence-transformers reads them, without it:
its import takes 6 s. Nothing outside the folder, no pickle and no code in it is read here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from raytriever.errors import UserError
from raytriever.reports.log import log
from retrieval.encoders.specification import DOCUMENT_PROMPTS, Pooling, Role, VectorForm

FORM_FILE = "vector_form.json"  # beside an exported encoder's modules: which vectors documents have
DOCUMENT_MODEL_FILE = "document_model.json"  # beside the modules of an encoder of queries alone
SCORING_FILE = "scoring.json"  # beside the modules of an encoder of queries that was trained with a scoring module
CONTEXTUAL_FILE = "contextual.json"  # beside the modules of a contextual encoder's second stage
FIRST_STAGE = "first_stage"  # the folder of its first stage there
CONTEXTUAL_TRANSFORMER = "ContextualTransformer"  # a contextual encoder's, in place of transformer and pooling
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's, beside an adapter's weights
LAYER_POOLING = "WeightedLayerPooling"  # of sentence-transformers: documents that average several layers

_VOCABULARY = (
    "tokenizer.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "tokenizer.model",
)
TOKENIZER_FILES = (
    *_VOCABULARY,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    "config.json",  # settings of the model beside it, which may name the tokenizer's class
)
"""All that may be read of a tokenizer's folder."""

TABLE = "StaticEmbedding"  # of token vectors, in place of transformer and pooling
_CHAIN = re.compile(f"(Transformer( Pooling)?|{TABLE})( Dense)*( Normalize)?")
POOLING_MODES: dict[str, Pooling] = {  # by their names in sentence-transformers
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
# their names in older releases, in the order of concatenation
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ROLE_PROMPTS = ("query", *DOCUMENT_PROMPTS)
_TASK = "feature-extraction"
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # in names of settings
_MODALITIES = {"text", "image", "audio", "video", "message"}
_NO_CODE_OR_WEIGHTS = (ImportError, SafetensorError)
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
class Modules:
    """The ``folder`` of an encoder and those of its modules, and whether vectors are normalised.

    They also are where sentence-transformers compares them by cosine, as it does unless the folder names another
    similarity: inner products of vectors that are not scaled rank otherwise. ``is_static``: in place of a transformer
    it has a table of token vectors, and no pooling.
    """

    folder: Path
    transformer: Path
    pooling: Path | None
    dense: tuple[Path, ...]
    normalize: bool
    is_static: bool = False


@dataclass(frozen=True)
class TextSettings:
    """A folder's settings of texts and vectors, None where it has none.

    ``prompts``: by name. ``max_lengths``: of queries, of documents.
    """

    prompts: Mapping[str, str]
    max_lengths: frozenset[int]
    lower_case: bool
    truncate_dim: int | None


def read_modules(path: Path, role: Role = "document") -> Modules:
    """The modules of a folder, of its route for ``role`` where it has several.

    Raises ``UserError`` for modules, or an order of them, that aren't supported.
    """
    folders: dict[str, list[Path]] = {}
    for kind, folder in _read_chain(path, role):
        folders.setdefault(kind, []).append(folder)
    first = folders.get("Transformer", folders.get(TABLE, [path]))[0]
    stated = read_json(path / "config_sentence_transformers.json")
    similarity = stated.get("similarity_fn_name")
    by_cosine = (path / "modules.json").exists() and similarity in (None, "cosine")
    if similarity not in (None, "cosine", "dot"):
        raise UserError(
            f"{path} compares its vectors by {similarity}, which isn't supported. Supported are cosine and dot: name"
            " one as similarity_fn_name in its config_sentence_transformers.json."
        )
    if by_cosine and "Normalize" not in folders and "similarity_fn_name" not in stated:
        warn_once(
            f"{path} names no similarity, so its vectors are scaled to length 1, for cosines, as sentence-transformers"
            " compares them. Where it was trained for inner products, set encoder.normalize to false."
        )
    return Modules(
        folder=path,
        transformer=first,
        pooling=folders.get("Pooling", [None])[0],
        dense=tuple(folders.get("Dense", [])),
        normalize="Normalize" in folders or by_cosine,
        is_static=TABLE in folders,
    )


def has_two_towers(path: Path) -> bool:
    """Whether the folder encodes queries and documents by different modules.

    One transformer with several vectors for documents, by the form beside it, is one tower.
    """
    query, document = read_modules(path, "query"), read_modules(path, "document")
    return query.transformer != document.transformer or (query != document and not (path / FORM_FILE).exists())


def _read_chain(path: Path, role: Role) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in order; nothing for a plain transformer."""
    listing = path / "modules.json"
    if not listing.exists():
        config = read_json(path / "config.json")
        if config.get("model_type") != "model2vec":
            return []
        return [(TABLE, path), *([("Normalize", path)] if config.get("normalize") else [])]
    with reading("The list of modules", listing):
        found = [(_kind(module["type"]), _inside(path, module["path"])) for module in read_json(listing)]
    chain = [each for kind, folder in found for each in _routed(kind, folder, role)]
    if (path / FORM_FILE).exists():  # which says what the module does
        chain = [(kind, folder) for kind, folder in chain if kind != LAYER_POOLING]
    kinds = " ".join(kind for kind, _ in chain)
    if not _CHAIN.fullmatch(kinds):
        raise UserError(
            f"{listing} chains {kinds!r}, which is not supported. Supported, in this order: Transformer, Pooling"
            f" (or {TABLE} instead of both), any number of Dense, Normalize."
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
    with reading("The list of routes", listing):
        config = read_json(listing)
        types, routes, mappings = config["types"], config["structure"], config["parameters"].get("route_mappings")
        if role in routes and not mappings:
            return [(_kind(types[name]), _inside(folder, name)) for name in routes[role]]
    raise UserError(
        f"{listing} has the routes {', '.join(sorted(routes))}{' with route_mappings' if mappings else ''}."
        " Supported are the routes query and document without mappings."
    )


def _kind(module_type: Any) -> str:
    return str(module_type).rpartition(".")[2]  # by its name alone: a class that isn't known is refused, not imported


def _inside(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} leads out of the model's folder")
    return folder / name


@contextmanager
def reading(what: str, path: Path) -> Iterator[None]:
    """Names ``what`` and its ``path`` to the user where it can't be read."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, *_NO_CODE_OR_WEIGHTS) as error:
        problem = " ".join(str(error).split()) if not isinstance(error, KeyError) else f"it has no {error}"
        raise UserError(f"{what} {path} can't be read: {problem}. Is the encoder's folder whole?") from error


def read_text_settings(modules: Modules) -> TextSettings:
    """The settings of texts in an encoder's folder, and in that of its transformer.

    Raises ``UserError`` for settings that would change vectors unseen.
    """
    config, transformer = read_json(modules.folder / "config_sentence_transformers.json"), modules.transformer
    prompts: dict[str, str] = config.get("prompts") or {}
    with reading("The settings of the transformer in", transformer):
        settings = _transformer_settings(transformer)
        kinds = {kind for kind in settings.get("modality_config") or () if set(kind.split("+")) <= _MODALITIES}
    if not kinds <= {"text"}:
        raise UserError(
            f"{transformer} has modality_config for other things than text, so texts would pass through a chat"
            " template. That is not supported. Save the model with the modality 'text' alone."
        )
    unknown = [key for key, value in settings.items() if value and key not in _TRANSFORMER_SETTINGS]
    if unknown or settings.get("transformer_task", _TASK) != _TASK:
        raise UserError(
            f"sentence_bert_config.json in {transformer} sets {', '.join(unknown) or 'transformer_task'}, which is not"
            f" supported. Supported: {', '.join(sorted(_TRANSFORMER_SETTINGS))} (transformer_task {_TASK} only)."
        )
    default = config.get("default_prompt_name")
    if prompts.get(default) and default not in _ROLE_PROMPTS:
        warn_once(
            f"{modules.folder}: default_prompt_name is {default!r}, but queries and documents have their own"
            " prompts or none, as in sentence-transformers' encode_query and encode_document. Set"
            f" query_prompt_name or document_prompt_name to {default!r} if one of them uses it."
        )
    general = settings.get("max_seq_length")
    lengths: list[int | None] = [settings.get(key) or general for key in ("query_length", "document_length")]
    return TextSettings(
        prompts={name: text for name, text in prompts.items() if text is not None},
        max_lengths=frozenset(length for length in lengths if length),
        lower_case=bool(settings.get("do_lower_case")),
        truncate_dim=config.get("truncate_dim"),
    )


def _transformer_settings(folder: Path) -> dict[str, Any]:
    """The settings in the first file that has any; the file's name depends on the family. None may ask to run code."""
    found = (read_json(folder / f"sentence_{family}_config.json") for family in _FAMILIES)
    settings: dict[str, Any] = dict(next(filter(None, found), {}))
    for key, value in settings.items():
        if key.endswith(("_args", "_kwargs")):
            settings[key] = {name: each for name, each in value.items() if name != "trust_remote_code"}
    return settings


def read_pooling(modules: Modules) -> Pooling:
    """The pooling that the Pooling module's folder names. Raises ``UserError`` for none and for several at once."""
    folder = modules.pooling
    if folder is None:
        # what transformers alone has fetched lacks an encoder's modules
        partly = " Or fetch the rest of it (hf download NAME): the hub may have a modules.json."
        raise UserError(
            f"{modules.folder} is a plain transformer without pooling settings. Set the encoder's pooling to the"
            f" one it was trained with: mean, cls or last_token.{partly if 'snapshots' in modules.folder.parts else ''}"
        )
    modes = _pooling_config(folder)["pooling_mode"]
    if isinstance(modes, str) and modes in POOLING_MODES:
        return POOLING_MODES[modes]
    named = modes if isinstance(modes, str) else ", ".join(modes)
    raise UserError(
        f"{folder}/config.json asks for a pooling that is not supported: {named}. Supported is one of"
        f" {', '.join(POOLING_MODES)}. Set the encoder's pooling to use another than the folder's."
    )


def pools_prompt(folder: Path | None) -> bool:
    """Whether the prompt's tokens take part in the pooling, as nearly everywhere."""
    return folder is None or _pooling_config(folder).get("include_prompt") is not False


def _pooling_config(folder: Path) -> dict[str, Any]:
    with reading("The pooling in", folder):
        config = dict(read_json(folder / "config.json"))
        chosen = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)]
        if "pooling_mode" not in config:
            config["pooling_mode"] = chosen[0] if len(chosen) == 1 else chosen or "mean"
        elif chosen and config["pooling_mode"] not in (chosen, *chosen):
            warn_once(f"{folder}/config.json: pooling_mode {config['pooling_mode']!r} counts, not the older {chosen}.")
    return config


def require_safetensors(folder: Path) -> None:
    """Raises ``UserError`` where a folder's weights are pickles, which may run any code, or lie outside of it."""
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    if pickles and not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds its weights only as a pickle ({pickles[0].name}), which isn't read because it can run any"
            " code. If you trust its origin, load it yourself and save it as safetensors (save_pretrained does)."
        )
    listing = folder / "model.safetensors.index.json"
    with reading("The list of weights", listing):
        names = sorted(set(read_json(listing).get("weight_map", {}).values()))
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(f"{listing} names {name!r}; weights are read only from safetensors files beside it.")


@cache
def warn_once(message: str) -> None:
    """Tells of a contradiction in a folder, once a process however often it is loaded."""
    log.warning(message)


def read_json(path: Path) -> Any:
    """The file's value, an empty mapping where it is absent. Raises ``UserError`` where it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON ({error}). Is the encoder's folder whole?") from error


def write_json(path: Path, value: Any) -> None:
    """Writes what ``read_json`` reads, the same bytes for equal values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def has_adapter(path: Path) -> bool:
    """Whether the encoder in the folder ``path`` is an adapter rather than a whole model."""
    return (read_modules(path).transformer / ADAPTER_CONFIG).exists()


def named_base(path: Path) -> tuple[str, str | None]:
    """Name and revision of the base model under the adapter at ``path``. Raises ``UserError`` where it names none."""
    listing = read_modules(path).transformer / ADAPTER_CONFIG
    config = read_json(listing)
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"{listing} names no base_model_name_or_path. Set the encoder's base_model to the model that the"
            " adapter was trained on."
        )
    return str(name), config.get("revision")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's files."""
    return any((folder / name).exists() for name in _VOCABULARY)


def require_tokenizer(folder: Path) -> None:
    """Raises ``UserError`` where the folder holds no tokenizer's files."""
    if not has_tokenizer(folder):
        raise UserError(
            f"{folder} holds no tokenizer (none of {', '.join(_VOCABULARY)}). Save the tokenizer beside the"
            " weights: tokenizer.save_pretrained(folder). For an encoder you can also set 'tokenizer' to the"
            " folder that has it."
        )


def is_contextual(path: Path) -> bool:
    """Whether the folder holds a contextual encoder."""
    return (path / CONTEXTUAL_FILE).exists()


def resolve_form(wanted: VectorForm | None, path: Path) -> tuple[VectorForm, Sequence[float] | None]:
    """The form of a document's vectors, ``wanted`` or as the folder says, and the alphas stored with just that form.

    Raises ``UserError`` where the folder's form can't be read.
    """
    listing = path / FORM_FILE
    with reading("The form of vectors", listing):
        values = read_json(listing)
        alpha = values.pop("alpha", None)
        stored = VectorForm.model_validate(values)
    return (stored, alpha) if wanted is None or wanted == stored else (wanted, None)


def read_document_model(path: Path) -> str | None:
    """For an encoder of queries only, the ``fingerprint`` of its documents' encoder contract. Otherwise None."""
    found: str | None = read_json(path / DOCUMENT_MODEL_FILE).get("document_model")
    return found
