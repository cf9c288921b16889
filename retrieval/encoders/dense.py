"""Dense layers behind the pooling, as sentence-transformers stores them, and weights of modules of ours."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.modules import reading, require_safetensors
from retrieval.encoders.pooling import at_least_float32


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
    from sentence_transformers.base.modules import Dense

    require_safetensors(folder)
    with reading("The Dense layer in", folder):
        # without code of its own sentence-transformers would put a tanh in the place of an activation
        activation = Dense.load_config(str(folder), local_files_only=True).get("activation_function", "torch.")
        layer = Dense.load(str(folder), local_files_only=True)
    if not activation.startswith("torch."):
        raise UserError(f"{folder}/config.json names activation {activation!r}; supported are torch's own modules.")
    reads = [layer.module_input_name, layer.module_output_name]
    if layer.use_residual or reads != ["sentence_embedding"] * 2:
        raise UserError(f"{folder}/config.json asks for a residual connection, or maps tokens; neither is supported.")
    return DenseLayer(layer.linear, layer.activation_function)


def load_weights(module: nn.Module, names: Set[str], path: Path) -> None:
    """Reads the safetensors file ``path`` into the parameters ``names`` of ``module``, which it holds and no others.

    Raises ``UserError`` where it can't be read, or holds others.
    """
    with reading("The weights", path):
        found = load_file(path)
        if differing := sorted(names ^ found.keys()):
            raise ValueError(f"either it or the form beside it has no {', '.join(differing)}")
        module.load_state_dict(found, strict=False)
