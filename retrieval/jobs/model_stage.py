"""Jobs with a pretrained model: it is found and checked before the run, and loaded and placed by workers.

Before a run only a model's configuration is read, no weights. What the configuration doesn't state is checked when the
model is loaded. A check here never refuses what would run.
"""

import socket
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.errors import NotLocal, UserError
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Config, Shard, Stage
from retrieval.encoders.modules import (
    Modules,
    TextSettings,
    has_adapter,
    has_tokenizer,
    is_contextual,
    read_json,
    read_modules,
    read_pooling,
    read_text_settings,
    require_safetensors,
    require_tokenizer,
)
from retrieval.encoders.pretrained import (
    BYTES_OF_A_TOKEN,
    LocatedModel,
    find_base,
    is_static,
    locate_named,
    seconds_of_tokens,
)
from retrieval.encoders.specification import (
    EncoderSettings,
    ModelSettings,
    require_dtype,
    require_length,
    require_positions,
    resolve_dtype,
)

if TYPE_CHECKING:
    import torch

    from retrieval.encoders.towers import Towers

_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")  # as BERT, DistilBERT, T5 and GPT-2 call them
_COMPRESSED = 3  # times that texts are smaller in an artifact


def is_there(key: str, model: ModelSettings, there: Set[str]) -> bool:
    """Whether the model of the setting ``key``, with its base and tokenizer, is among the inputs ``there``."""
    parts = [name for name in ("model", "base_model", "tokenizer") if getattr(model, name, None) is not None]
    return {f"{key}.{name}" for name in parts} <= there


@cache
def folder_of(key: str, model: ModelSettings) -> Path:
    """The folder of the model of the setting ``key``. Cached, because a sweep's trials look for the same one.

    Raises ``NotLocal``.
    """
    try:
        return locate_named(model).path
    except UserError as error:
        raise NotLocal(f"{key}.model: {error}") from error


def check_model(settings: ModelSettings, path: Path, key: str, lengths: Mapping[str, int | None]) -> None:
    """Refuses a tokenizer, layers and lengths that the model in ``path`` lacks, as loading it would.

    ``key`` is the key of ``settings``. ``lengths`` are tokens of a text, by the settings that ask for them. Raises
    ``UserError``.
    """
    if isinstance(settings, EncoderSettings):
        known = _EncoderFolder.read(settings, path)
        if known is not None:
            settings.resolve_prompts(known.texts.prompts)
            _check_encoder(settings, known, path, key, lengths)
    elif not has_adapter(path):  # which is refused as a language model
        require_tokenizer(path)


def prompts_ahead(settings: EncoderSettings, path: Path) -> dict[str, str] | None:
    """The encoder's prompts by name before it is loaded; None where that will name a problem of its folder.

    Raises ``UserError`` where a prompt is wanted that it doesn't have.
    """
    known = _EncoderFolder.read(settings, path)
    return settings.resolve_prompts(known.texts.prompts) if known is not None else None


@dataclass(frozen=True)
class _EncoderFolder:
    """The settings in an encoder's folder: its transformer's folder, its base's, how it pools and reads texts."""

    transformer: Path
    base: Path
    pooled: Modules
    texts: TextSettings

    @classmethod
    def read(cls, settings: EncoderSettings, path: Path) -> Self | None:
        """None where loading the encoder will name a problem of the folder."""
        try:
            modules, under = read_modules(path), find_base(path, settings.base_model)
            base = read_modules(under.path) if under else modules
            pooled = modules if modules.pooling else base
            texts = read_text_settings(pooled)
        except UserError:
            return None
        return cls(modules.transformer, base.transformer, pooled, texts)


def _check_encoder(
    settings: EncoderSettings, known: _EncoderFolder, path: Path, key: str, lengths: Mapping[str, int | None]
) -> None:
    if is_contextual(path):
        return  # another folder knows more of it
    if settings.tokenizer is None and not has_tokenizer(known.transformer):
        require_tokenizer(known.base)
    if is_static(settings, path):
        return
    require_safetensors(known.base)
    if settings.pooling == "auto":
        try:
            read_pooling(known.pooled)
        except UserError as error:
            raise UserError(f"{key}.pooling: {error}") from error
    config = read_json(known.base / "config.json")
    count = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), None)
    if settings.form is not None and count is not None:
        settings.form.require_last_layer(count, f"{key}.form.layers", settings.model)
    if settings.max_length is None and not any(lengths.values()):
        return
    from retrieval.encoders.transformer import read_longest_text

    positions = read_longest_text(known.base)
    if isinstance(positions, int):
        require_positions(settings.max_length, positions, f"{key}.max_length", settings.model)
    most = settings.max_length or (next(iter(stated)) if len(stated := known.texts.max_lengths) == 1 else positions)
    if isinstance(most, int):
        for name, wanted in lengths.items():
            require_length(wanted, most, name, f"{key}.max_length")


class ModelStage(Stage[Config], Generic[Config]):
    """A stage with actors as workers, which load the model of one setting once.

    ``model_setting`` names it, a ``ModelSettings`` with a ``dtype``. The driver resolves and records 'auto', so that
    every worker computes in the same way.
    """

    model_setting: ClassVar[str] = "encoder"
    keeps_state = True

    def __init__(self, config: Config) -> None:
        source: Any = getattr(config, self.model_setting)
        dtype = resolve_dtype(source.dtype, gpu=config.resources.gpus_per_worker > 0)
        super().__init__(config.model_copy(update={self.model_setting: source.model_copy(update={"dtype": dtype})}))

    @property
    def _model(self) -> Any:
        return getattr(self.config, self.model_setting)

    @cached_property
    def located(self) -> LocatedModel:
        """The model's files on this machine. Raises ``UserError`` where they can't be had."""
        return locate_named(self._model)

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """The model's covers its base and its tokenizer."""
        if key.startswith(f"{self.model_setting}."):
            return self.located.fingerprint if key.endswith(".model") else None
        return super().fingerprint_of(key, path)

    def has_model(self, there: Set[str]) -> bool:
        """Whether the model is among the inputs that are ``there``."""
        return is_there(self.model_setting, self._model, there)

    def check_inputs(self, there: Set[str]) -> None:
        """A model that can't be had; a tokenizer, layers and lengths that it doesn't have."""
        if self.has_model(there):
            check_model(self._model, folder_of(self.model_setting, self._model), self.model_setting, {})

    def seconds_here(self, pending: list[Shard]) -> float:  # noqa: ARG002
        """Seconds of a forward pass of the model over all texts of its inputs."""
        own = f"{self.model_setting}."
        paths = [path for key, path in input_paths(self.config).items() if not key.startswith(own)]
        texts = sum(Artifact(path).bytes for path in paths if is_artifact(path))
        return seconds_of_tokens(self.located, self._model, _COMPRESSED * texts / BYTES_OF_A_TOKEN)

    def placement(self) -> "tuple[torch.device, torch.dtype]":
        """The device and precision of this worker's model.

        Raises ``UserError`` where torch finds no GPU for a worker that was given one. Also where the processor lacks
        the precision that the driver chose.
        """
        import torch

        dtype = resolve_dtype(self._model.dtype)
        host, gpus = socket.gethostname(), self.config.resources.gpus_per_worker
        if gpus and not torch.cuda.is_available():
            raise UserError(
                f"gpus_per_worker is {gpus}, but torch finds no GPU on {host}. Install a torch built for CUDA there, or"
                " set resources.gpus_per_worker to 0."
            )
        require_dtype(dtype, host, gpu=gpus > 0)
        return torch.device("cuda" if gpus else "cpu"), getattr(torch, dtype)

    def load_placed_towers(self) -> "Towers":
        """The encoders in the resolved precision, on a GPU where the worker has one."""
        from retrieval.encoders.structure import place_module
        from retrieval.encoders.towers import load_towers

        placement, located = self.placement(), self.located
        towers = load_towers(self._model, located.path, located.fingerprint).eval()
        place_module(towers, *placement)
        return towers
