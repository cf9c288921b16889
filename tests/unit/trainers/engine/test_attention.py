"""By which kernel a step on a CPU computes attention: what ran, in every objective, also where it is computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from raytriever.settings.configuration import validate
from retrieval.encoders.attention import fastest_attention
from tests.gpu.objectives import ONE_OF_EACH, make_objective
from tests.gpu.test_objectives import step
from tests.unit.trainers.pair_batches import pair, store_pairs
from trainers.training_run import RunSettings, run_training

# kinds that attend as another does
LOSSES_ALONE = (
    "adaptive_margin, static", "multi_layer, self_contrastive", "multi_layer, scalar_mix", "coder, info_nce",
    "coder, max_margin", "coder, smoothed",
)  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts flash attention on CPUs, and softmaxes over the products of heads by their precision."""

    def __init__(self) -> None:
        super().__init__()
        self.flash, self.products = 0, dict.fromkeys((torch.bfloat16, torch.float32), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            self.flash += 1
        if name in ("_softmax", "_safe_softmax") and args[0].dim() == 4:
            self.products[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [each for each in ONE_OF_EACH if each.values[0] not in LOSSES_ALONE])
def test_in_bfloat16_short_texts_are_trained_by_products(name: str, tiny_encoder: Path) -> None:
    found, exact = Kernels(), Kernels()
    with exact:
        step(make_objective(name, tiny_encoder), name, bf16=False)
    with found:
        step(make_objective(name, tiny_encoder), name, bf16=True)
    trained = found.products[torch.bfloat16]
    assert trained
    assert exact.flash >= trained
    assert not any(exact.products.values())
    # what is left to the flash kernel has no backward pass: contexts and frozen models
    assert found.flash == exact.flash - trained


@pytest.mark.parametrize("again", [{}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_a_run_obeys(kernel: str, again: dict[str, Any], tiny_encoder: Path, tmp_path: Path) -> None:
    values = {
        "batches": store_pairs(tmp_path / "batches", [[pair(row) for row in range(4)]]),
        "encoder": {"model": str(tiny_encoder), "pooling": "mean", "attention": kernel},
        "dropout": 0.0,
        "objective": {"kind": "contrastive"},
        "training": {"bf16": False},
    }
    settings = validate(RunSettings, values | again, "run")
    with Kernels() as found:
        run_training(settings, settings.located(), str(tmp_path / "run"), torch.device("cpu"))
    assert (found.flash > 0) == (kernel == "auto")


@pytest.mark.parametrize(("tokens", "flash"), [(512, 0), (513, 1)])
def test_long_texts_keep_their_memory_small(tokens: int, flash: int) -> None:
    query, key, value = torch.randn(3, 1, 1, tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    with fastest_attention(), Kernels() as found:
        trained = functional.scaled_dot_product_attention(query, key, value)
        assert found.flash == flash
        with torch.no_grad():
            embedded = functional.scaled_dot_product_attention(query=query, key=key, value=value)
    assert found.flash == flash + 1
    torch.testing.assert_close(trained, embedded, rtol=0.05, atol=0.01)
