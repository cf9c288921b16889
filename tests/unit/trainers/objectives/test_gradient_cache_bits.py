"""The gradient cache changes no bit of a gradient, in any objective: a run may go on with it from its checkpoint."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from raytriever.settings.configuration import without_inputs
from tests.gpu.objectives import KINDS, epoch_batch, make_objective, make_rows
from tests.unit.trainers.objectives.test_settings import REQUIRED
from tests.unit.trainers.tiny import random_batch
from trainers.objective import Objective
from trainers.run_settings import AnyObjectiveSettings

SELF_CONTRASTIVE = {"kind": "multi_layer", "training_form": "self_contrastive", "regularisation": 1.0}
CONTEXTUAL = {"kind": "contextual", "context_documents": 4, "sequence_dropout": 0.2}
OF_KINDS = (
    "contrastive", "adaptive_margin", "margin_mse", "multi_layer, self_contrastive", "coder", "revela", "replug",
    "contextual, prefix",
)  # fmt: skip
CASES = {name: KINDS[name] for name in OF_KINDS} | {
    "multi_layer, all tokens": (SELF_CONTRASTIVE, {"kind": "all_tokens", "reduction": "last"}, random_batch),
    "contrastive, LoRA": KINDS["contrastive"],
    "contextual, dropped": (CONTEXTUAL, None, epoch_batch),
    "contextual, released": (CONTEXTUAL | {"variant": "released", "vectors_per_document": 2}, None, epoch_batch),
}


@pytest.fixture
def build(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Objective[Any]]:
    """An objective with dropout in its encoder, weights always the same."""

    def built(case: str, *, cached: bool, chunk_size: int = 3) -> Objective[Any]:
        settings, form, rows = CASES[case]
        settings = settings | {"chunk_size": chunk_size, "gradient_cache": cached}
        monkeypatch.setitem(KINDS, case, (settings, form, rows))
        return make_objective(case, tiny_encoder, lora="LoRA" in case, dropout=0.3).train()

    return built


def gradients(objective: Objective[Any], rows: pa.Table, *, bf16: bool) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    batch = objective.collate(rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outcome = objective(batch)
    outcome.loss.backward()
    return outcome.loss.detach(), {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


def passes_of(objective: Objective[Any]) -> Counter[int]:
    """How often each table of its encoders is read from now on."""
    passes = Counter[int]()
    encoders = torch.nn.ModuleList([objective.encoder("query"), objective.encoder("document")])
    for number, table in enumerate(each for each in encoders.modules() if isinstance(each, torch.nn.Embedding)):
        table.register_forward_pre_hook(lambda *_, number=number: passes.update([number]))
    return passes


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_cache_changes_no_bit(build: Callable[..., Objective[Any]], case: str, bf16: bool) -> None:
    plain, cached = build(case, cached=False), build(case, cached=True)
    once, twice = passes_of(plain), passes_of(cached)
    loss, expected = gradients(plain, make_rows(case, 0), bf16=bf16)
    same, found = gradients(cached, make_rows(case, 0), bf16=bf16)
    assert torch.equal(loss, same)
    assert max(once.values()) > 1
    assert all(twice[number] in (2 * count - 1, 2 * count) for number, count in once.items())  # a context is read once
    assert found.keys() == expected.keys()
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert all("lora_" in name for name in found) == ("LoRA" in case)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("case", "passes"), [("contrastive", 2), ("margin_mse", 1)])
def test_a_chunk_a_side_is_encoded_once(build: Callable[..., Objective[Any]], case: str, passes: int) -> None:
    objective, encoded = build(case, cached=True, chunk_size=64), []
    objective.document_encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    loss, found = gradients(objective, make_rows(case, 0), bf16=False)
    assert len(encoded) == passes
    same, expected = gradients(build(case, cached=False, chunk_size=64), make_rows(case, 0), bf16=False)
    assert torch.equal(loss, same)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_cache_shapes_no_run_and_its_default_is_recorded(case: str) -> None:
    """Models of before it was left out keep their configuration, which has it."""

    def settings(**values: Any) -> Any:
        given = REQUIRED.get(CASES[case][0]["kind"], {}) | CASES[case][0] | values
        return TypeAdapter(AnyObjectiveSettings).validate_python(given)

    plain = settings(chunk_size=3)
    assert settings(chunk_size=3, gradient_cache=True).shaping() == plain.shaping()
    assert plain.shaping()["gradient_cache"] is False
    assert settings(chunk_size=4).shaping() != plain.shaping()
    before = without_inputs(plain)
    if plain.kind == "revela":
        del before["language_model"]["activation_checkpointing"]
    assert plain.shaping() == before
