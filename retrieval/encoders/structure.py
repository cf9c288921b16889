"""How a transformer of any family is built: its blocks, its positions, and what runs its parts by themselves."""

from typing import Any, ClassVar

import torch
from torch import nn

from raytriever.errors import UserError


class ShardedUnit(nn.Module):
    """A module of ours that runs a transformer's blocks itself, and is shared out as a Hugging Face model is.

    ``entrances``: its methods beside ``forward`` that compute by its own weights. Sharding gathers weights around them
    as around ``forward``, of the instance alone and only once at a time: one calls another by the class.
    """

    entrances: ClassVar[tuple[str, ...]] = ()


def place_module(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Moves the module to ``device``, its weights in ``dtype``; buffers and tables of tokens keep their precision.

    Training reads rotary positions from float32 tables. Frequencies rounded to bfloat16 would turn token 2,048 by
    another angle altogether.
    """
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            kept = getattr(each, "sparse", False)  # a table's rows are added up: nothing is faster in bfloat16
            parameter.data = parameter.data.to(device, None if kept else dtype)
    module.to(device)


def position_limit(transformer: nn.Module) -> int | None:
    """Number of tokens with a learned position each; None for rotary and relative positions.

    RoBERTa's and MPNet's tables hold ``padding_idx + 1`` rows that no token uses: 512 positions of 514.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in ("position_embeddings", "wpe"):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def is_causal(transformer: nn.Module) -> bool:
    """Whether a token reads those before it alone, as in a decoder: by what the model's attention layers say."""
    return any(getattr(module, "is_causal", False) is True for module in transformer.modules())


def is_bidirectional_decoder(transformer: nn.Module) -> bool:
    """Whether this is a decoder, but by its configuration its tokens read the whole text."""
    return getattr(transformer.config, "is_causal", None) is False


def has_own_code(transformer: nn.Module) -> bool:
    """Whether its class is of its folder, not of transformers."""
    return any(base.__module__.startswith("transformers_modules.") for base in type(transformer).__mro__)


def transformer_blocks(transformer: nn.Module) -> list[nn.Module]:
    """Its blocks in order: the members of its outermost list of modules, which every family names differently.

    Raises ``UserError`` where it has no such list.
    """
    blocks = _blocks_below(transformer)
    if not blocks:
        raise UserError(
            f"{type(transformer).__name__} has no list of blocks (torch.nn.ModuleList), so its blocks can't be"
            " sharded, compiled or recomputed one by one. Leave out sharding, compile and activation_checkpointing."
        )
    return blocks


def _blocks_below(module: nn.Module) -> list[nn.Module]:
    children = module.children()
    return [
        block for child in children for block in (child if isinstance(child, nn.ModuleList) else _blocks_below(child))
    ]


def linear_parameters(transformer: nn.Module, *, with_head: bool = False) -> list[nn.Parameter]:
    """Weights of the linear layers in its blocks only. Autocast multiplies by these in bfloat16.

    ``with_head`` adds a language model's head (``lm_head``), unless that shares the embeddings' table. Embeddings and
    normalisations are not included.
    """
    from transformers.pytorch_utils import Conv1D

    linear: dict[int, nn.Parameter] = {}
    head = getattr(transformer, "lm_head", None) if with_head else None
    for block in [*_blocks_below(transformer), *([] if head is None else [head])]:
        for layer in block.modules():
            if isinstance(layer, nn.Linear | Conv1D):
                linear |= {id(parameter): parameter for parameter in layer.parameters(recurse=False)}
    for module in transformer.modules():
        if not isinstance(module, nn.Linear | Conv1D):
            for parameter in module.parameters(recurse=False):
                linear.pop(id(parameter), None)
    return list(linear.values())


def outermost_transformers(module: nn.Module) -> list[nn.Module]:
    """The outermost Hugging Face models in ``module``, and what stands for one."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel | ShardedUnit):
        return [module]
    found = {id(inner): inner for child in module.children() for inner in outermost_transformers(child)}
    return list(found.values())


def numbered_blocks(transformer: nn.Module) -> list[nn.Module]:
    """The transformer's layers in order. Raises ``UserError`` where they aren't as many as its configuration says."""
    config: Any = transformer.config
    blocks, count = transformer_blocks(transformer), config.num_hidden_layers
    if len(blocks) != count:
        raise UserError(
            f"{type(transformer).__name__} has {count} layers but {len(blocks)} blocks for them (in some models"
            " they share their weights), so single layers can't be read. Use the form single."
        )
    return blocks
