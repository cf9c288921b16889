"""What can be known of pretrained models before a run begins: that they can be had, and that settings fit them.

Nothing of a model is read but its configuration. What that doesn't say is left to whoever loads the model: a check here
never refuses what would run.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from raytriever.retrieval.encoders.adapter import has_adapter
from raytriever.retrieval.encoders.modules import CONTEXTUAL_FILE, ModuleSettings, read_json, read_modules
from raytriever.retrieval.encoders.pretrained import locate_named
from raytriever.retrieval.encoders.specification import EncoderSettings, ModelSettings, require_length
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.before_run import made_by, missing_here
from raytriever.retrieval.jobs.stage import Stage

_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")  # as BERT, DistilBERT, T5 and GPT-2 call them


def is_made(run: Mapping[str, Stage[Any]], model: ModelSettings) -> bool:
    """Whether the model, or its base, is made by the run, so that it need not be there yet."""
    return any(made_by(run, path) for path in (model.model, model.base_model) if path)


@cache
def folder_of(model: ModelSettings) -> Path:
    """Where the model's files are; a sweep's trials look for one and the same. Raises ``NotHere``."""
    with missing_here(by_driver=True):
        return locate_named(model).path


def check_encoder(settings: EncoderSettings, path: Path, key: str, lengths: Mapping[str, int | None]) -> None:
    """Layers and lengths that the encoder in ``path`` doesn't have, as those who load it refuse them: ``UserError``.

    ``key``: of ``settings``; ``lengths``: tokens of a text, by the names of the settings that ask for them.
    """
    modules = _modules(path)
    if modules is None:
        return
    config = read_json(modules.transformer / "config.json")
    count = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), None)
    form = settings.form
    if form is not None and form.kind == "layers" and count is not None and form.layers[-1] != count:
        raise UserError(
            f"{key}.form.layers is {list(form.layers)}. It must end in {count}, the last layer of {settings.model},"
            f" whose vector queries have; before it, any of 1 to {count - 1}."
        )
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and settings.max_length is not None and settings.max_length > positions:
        raise UserError(
            f"{key}.max_length is {settings.max_length}, over the limit of {settings.model}, {positions} tokens. Lower"
            " it, or choose another encoder."
        )
    stated = next(iter(modules.max_lengths)) if len(modules.max_lengths) == 1 else None
    most = settings.max_length or stated or positions
    if isinstance(most, int):
        for name, wanted in lengths.items():
            require_length(wanted, most, name, f"{key}.max_length")


def _modules(path: Path) -> ModuleSettings | None:
    """What the folder says of its modules; None where its base model or another reader knows more of it."""
    if has_adapter(path) or (path / CONTEXTUAL_FILE).exists():
        return None
    try:
        return read_modules(path)
    except UserError:
        return None
