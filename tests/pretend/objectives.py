"""A training step on the pretend device against the same step on the CPU, and how often it waits for the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.objectives import KINDS, make_objective, make_rows
from tests.gpu.test_objectives import cosine, gradients_of, step
from tests.pretend_device import DEVICE, counted_waits
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.trainers.several_batches import several_batches
from trainers.engine import gradient_cache
from trainers.objective import pinned, to_device

# of a step of two stored batches: one for what it measured, and what an objective asks of the device besides
WAITS = dict.fromkeys(KINDS, 1) | {
    "revela": 3, "revela, again": 3, "revela, frozen": 3,  # which documents read which
}  # fmt: skip
IN_BFLOAT16 = (
    "contrastive", "margin_mse", "multi_layer", "multi_layer, scalar_mix", "revela", "contextual", "replug", "coder",
    "coder, max_margin", "coder, lists", "coder, lists alone",
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_the_cpu_and_waits_no_more_often_than_it_must(tiny_encoder: Path, name: str) -> None:
    reference = make_objective(name, tiny_encoder)
    expected = step(reference, name, bf16=False)
    objective = make_objective(name, tiny_encoder).to(DEVICE)
    with counted_waits() as waits:
        found = step(objective, name, bf16=False)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert cosine(gradients_of(objective), gradients_of(reference)) > 0.99999
    lines = "\n".join(f"{count} at {line}" for line, count in waits.most_common())
    assert waits.total() <= WAITS[name], f"a step of {name} waits {waits.total()} times, not {WAITS[name]}:\n{lines}"


@pytest.mark.parametrize("name", ["contrastive", "contrastive, cached"])
def test_a_decoder_is_waited_for_once_more_in_each_pass(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model("llama", tmp_path / "llama")
    reference, objective = (make_objective(name, folder, pooling="last_token") for _ in range(2))
    passes: list[None] = []
    objective.to(DEVICE).encoder("query").transformer.register_forward_hook(lambda *_: passes.append(None))
    with counted_waits() as waits:
        found = step(objective, name, bf16=False)
    assert found == pytest.approx(step(reference, name, bf16=False), rel=1e-4, abs=1e-6)
    assert waits.total() <= 1 + len(passes), waits  # transformers asks whether texts are packed


def test_negatives_of_a_whole_step_ask_nothing_of_the_device(tiny_encoder: Path) -> None:
    rows, losses = several_batches(3), []
    for device in (torch.device("cpu"), DEVICE):
        objective: Any = make_objective("contrastive", tiny_encoder).to(device)
        objective.settings = objective.settings.model_copy(update={"share_negatives": "step"})
        batch = pinned(objective.collate(rows), device)
        with counted_waits() as waits:
            loss = objective(to_device(batch, device)).loss
            loss.backward()
        assert not waits
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_is_near_float32(tiny_encoder: Path, name: str) -> None:
    reference = make_objective(name, tiny_encoder, lora=True)
    expected = step(reference, name, bf16=False)
    objective = make_objective(name, tiny_encoder, lora=True).to(DEVICE)
    found = step(objective, name, bf16=True)
    assert {p.grad.dtype for p in objective.parameters() if p.grad is not None} == {torch.float32}
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert found["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    assert cosine(gradients_of(objective), gradients_of(reference)) > 0.98


@pytest.mark.parametrize("name", ["contrastive, cached", "contextual, cached", "coder, cached"])
def test_the_gradient_cache_draws_again_what_it_drew(
    tiny_encoder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients(*, cached: bool) -> dict[str, Tensor]:
        objective: Any = make_objective(name, tiny_encoder, dropout=0.3).to(DEVICE).train()
        objective.settings = objective.settings.model_copy(update={"gradient_cache": cached})
        torch.manual_seed(0)
        objective(to_device(objective.collate(make_rows(name, 0, size=6)), DEVICE)).loss.backward()
        return gradients_of(objective)

    expected, found = gradients(cached=False), gradients(cached=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    checkpoint = gradient_cache.checkpoint

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(*args, **kwargs | {"preserve_rng_state": False})

    monkeypatch.setattr(gradient_cache, "checkpoint", forgetful)
    assert cosine(gradients(cached=True), expected) < 0.99
