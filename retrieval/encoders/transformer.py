"""The transformer of an encoder: any Hugging Face encoder or decoder, loaded from safetensors alone.

And what training may do to its blocks: compute their activations again in the backward pass, or compile them.
"""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError
from retrieval.encoders.modules import safe_weights
from retrieval.encoders.structure import transformer_blocks

# what transformers doesn't know of published weights' names: pattern and replacement, by family
_OTHER_NAMES = {"nomic_bert": {r"^bert\.": ""}}  # the pretrained model, whose class held the encoder under this name


def load_transformer(path: Path, trust_remote_code: bool, dropout: float | None) -> nn.Module:
    """The model at ``path`` in float32, without a head; of T5 the encoder; no cache of keys and values.

    ``dropout``: the probability of every dropout, None: as the configuration says. Raises ``UserError``.
    """
    from transformers import AutoModel, T5EncoderModel

    def loader(config: Any) -> Any:
        config.use_cache = False  # nothing is generated
        config.output_hidden_states = False  # of chosen layers, ``LayerStates`` keeps what is needed
        return T5EncoderModel if config.model_type in ("t5", "mt5") else AutoModel

    transformer, missing = load_pretrained(path, loader, "encoder", trust_remote_code, dropout)
    _settle_pooler(transformer, path, missing)
    return transformer


def load_pretrained(
    path: Path,
    loader: Callable[[Any], Any],
    what: str,
    trust_remote_code: bool,
    dropout: float | None,
    **arguments: Any,
) -> tuple[nn.Module, set[str]]:
    """The Hugging Face model at ``path`` in float32, from safetensors, and the names of weights that the folder lacks.

    ``loader``: the transformers class for a configuration, which it may change; ``what``: the model, for the user;
    ``dropout``: the probability of every dropout, None: as the configuration says. Raises ``UserError``.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig

    if not (path / "config.json").exists():
        raise UserError(
            f"{path} holds no config.json, so it is no model folder. Give a folder as save_pretrained writes it."
        )
    safe_weights(path, "model.safetensors")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if dropout is not None:
            set_dropout(config, dropout)
        model, report = loader(config).from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            key_mapping=_OTHER_NAMES.get(config.model_type),
            **arguments,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(f"The {what} in {path} can't be loaded: {first_line(error)}") from error
    return model, set(report["missing_keys"])


def set_dropout(config: Any, dropout: float) -> None:
    """Every family names its dropouts differently: all numbers of the configuration whose name says so."""
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, dropout)


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def checkpoint_activations(transformer: nn.Module) -> None:
    """In training a block keeps its input alone and is computed again in the backward pass, dropout included.

    A third more computation for the memory of one block's activations instead of all. Gradients stay the same. Works in
    place for every family (Hugging Face's own switch leaves some out), inside the gradient cache too.
    """
    for block in transformer_blocks(transformer):
        _replace_forward(block, functools.partial(_run_checkpointed, block, block.forward))


def _run_checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_blocks(transformer: nn.Module, backend: str = "inductor") -> None:
    """Compiles every block for any number of texts of any length, in place: at the first pass, within a minute or two.

    Blocks, not the whole: hooks on a block stay outside what is compiled, equal blocks share one compilation, and names
    of weights stay. Call it before ``checkpoint_activations``. Dropout then draws other numbers than without it. Raises
    ``UserError`` where there is no C++ compiler.
    """
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if backend == "inductor" and not any(name and shutil.which(name) for name in compilers):
        raise UserError(
            "compile needs a C++ compiler, and this machine has none (CXX, g++, clang++, c++). Install one (on Debian:"
            " apt-get install g++), or set compile to false."
        )
    for block in transformer_blocks(transformer):
        _replace_forward(block, torch.compile(block.forward, dynamic=True, backend=backend))


def _replace_forward(block: nn.Module, forward: Callable[..., Any]) -> None:
    """On the instance: hooks are called around it as before, and parameters keep their names."""
    block.forward = forward


def _settle_pooler(transformer: nn.Module, path: Path, missing: set[str]) -> None:
    """No vector depends on a BERT's pooler: it isn't trained, and kept for the export where the folder has it.

    Raises ``UserError`` where the folder lacks other weights: they would be random.
    """
    lacking = sorted(name for name in missing if not name.startswith("pooler."))
    if lacking:
        raise UserError(
            f"The weights in {path} lack {len(lacking)} tensors that its config.json asks for, the first {lacking[0]}."
            " Do they belong together?"
        )
    if missing:
        transformer.pooler = None  # type: ignore[assignment]
    for name, parameter in transformer.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
