"""The precision of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.attention import fastest_attention
from retrieval.encoders.structure import linear_parameters, outermost_transformers
from trainers.engine.settings import TrainingSettings


@contextmanager
def arithmetic(training: TrainingSettings, device: torch.device) -> Iterator[None]:
    """Sets a step's precision: on a GPU with TensorFloat-32 and deterministic kernels as ``training`` says.

    On a CPU it picks the fastest kernel of attention. Afterwards everything is as before.

    Searching and clustering never run in it, because they rank by bounds on the errors of float32 products. Raises
    ``UserError`` if deterministic kernels are wanted and one has no such form.
    """
    if device.type != "cuda":
        with fastest_attention():
            yield
        return
    products, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.use_deterministic_algorithms(training.deterministic)
    try:
        yield
    except RuntimeError as error:
        if not training.deterministic or "deterministic" not in str(error):
            raise
        what = str(error).split(". ")[0]
        raise UserError(
            f"training.deterministic: {what}. Leave the setting out, or train without what uses it."
        ) from error
    finally:
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(deterministic)


def round_frozen(module: nn.Module) -> None:
    """Keeps the frozen weights of linear layers, heads included, in bfloat16, in place: as autocast reads them.

    Of weights without a gradient autocast would make, and keep for the backward pass, a copy in each forward pass.
    """
    for transformer in outermost_transformers(module):
        for parameter in linear_parameters(transformer, with_head=True):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


def restore_frozen(module: nn.Module, exact: nn.Module) -> None:
    """Puts what ``round_frozen`` rounded in ``module`` back in float32, from the same module as it was loaded.

    Where the weights in ``exact`` are: on the CPU, say, for what no GPU has room for.
    """
    weights = dict(exact.named_parameters())
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = weights[name].data
