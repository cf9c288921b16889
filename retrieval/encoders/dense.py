"""Dense layers behind the pooling, as sentence-transformers stores them, and weights of modules of ours."""

import importlib
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.modules import read_json, reading, require_safetensors
from retrieval.encoders.pooling import at_least_float32

_VECTORS = "sentence_embedding"  # what a module reads and writes that maps vectors, not tokens


class DenseLayer(nn.Module):
    """A linear map after pooling, with the activation its folder names."""

    def __init__(self, linear: nn.Linear, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        """(n, in) to (n, out) in float32, or in float64 where the weights are; computed in the weights' precision."""
        mapped: Tensor = self.activation(self.linear(vectors.to(self.linear.weight.dtype)))
        return at_least_float32(mapped)


def width_behind(transformer: nn.Module, dense: Sequence[nn.Module]) -> int:
    """Numbers of a vector behind the pooling of ``transformer`` and ``dense`` layers."""
    last: Any = dense[-1] if dense else None
    config: Any = transformer.config
    return int(config.hidden_size if last is None else last.linear.out_features)


def load_dense(folder: Path) -> DenseLayer:
    """A Dense module's layer. Raises ``UserError`` where it isn't whole, or does what a ``DenseLayer`` can't."""
    require_safetensors(folder)
    with reading("The Dense layer in", folder):
        config = read_json(folder / "config.json")
        linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
        named: str = config.get("activation_function", "torch.nn.Tanh")
        if not named.startswith("torch."):
            raise UserError(f"{folder}/config.json names activation {named!r}; supported are torch's own modules.")
        module, _, name = named.rpartition(".")
        activation = getattr(importlib.import_module(module), name)
        if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
            raise ValueError(f"its activation {named} is no module")
        reads: str = config.get("module_input_name", _VECTORS)
        if config.get("use_residual") or {reads, config.get("module_output_name") or reads} != {_VECTORS}:
            raise UserError(
                f"{folder}/config.json asks for a residual connection, or maps tokens; neither is supported."
            )
        weights = load_file(folder / "model.safetensors")
        linear.load_state_dict({name.removeprefix("linear."): weight for name, weight in weights.items()})
        return DenseLayer(linear, activation())


def load_layers(folders: Sequence[Path]) -> tuple[list[DenseLayer], int | None]:
    """The layers of Dense modules, and how many numbers of a vector a last one keeps that is a ``cut``, else None."""
    layers = [load_dense(folder) for folder in folders]
    if layers and type(layers[-1].activation) is nn.Identity:
        weight, *bias = layers[-1].linear.parameters()
        if not bias and len(weight) < weight.shape[1] and torch.equal(weight, torch.eye(*weight.shape)):
            return layers[:-1], len(weight)
    return layers, None


def cut(width: int, kept: int) -> DenseLayer:
    """The layer that keeps the first numbers of a vector: what sentence-transformers applies before it normalises."""
    linear = nn.Linear(width, kept, bias=False)
    linear.weight.data = torch.eye(kept, width)
    return DenseLayer(linear, nn.Identity())


def load_weights(module: nn.Module, names: Set[str], path: Path) -> None:
    """Reads the safetensors file ``path`` into the parameters ``names`` of ``module``, which it holds and no others.

    Raises ``UserError`` where it can't be read, or holds others.
    """
    with reading("The weights", path):
        found = load_file(path)
        if differing := sorted(names ^ found.keys()):
            raise ValueError(f"either it or the form beside it has no {', '.join(differing)}")
        module.load_state_dict(found, strict=False)
