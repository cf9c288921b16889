"""Training with checkpoints, validation and embedding on the pretend device, as on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrieval.embedding import encode_texts
from tests.gpu.objectives import make_objective
from tests.pretend_device import DEVICE
from tests.unit.trainers.tiny import Reports, TinyBatches, figures_of, tiny_settings, weights_of
from tests.unit.trainers.validation.made_up import PairObjective, encoder_settings, load, make_collection, spread
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.engine.settings import ScheduleSettings
from trainers.objective import Objective
from trainers.validation.batches import BatchValidation
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import BatchValidationSettings, RetrievalValidationSettings

CPU = torch.device("cpu")
NAME = "contrastive"
TEXTS = ["import this", "the value of an index", "def open(file):", "", "import this", "with open(file) as lines: " * 4]


def trained(
    folder: Path, steps: int, checkpoints: Path | None = None, device: torch.device = DEVICE, dropout: float = 0.3
) -> tuple[Objective[Any], list[dict[str, Any]]]:
    """A run of so many steps, from its last checkpoint on, and what it reported."""
    objective, reported = make_objective(NAME, folder, dropout=dropout).to(device), []
    settings = tiny_settings(max_steps=steps, checkpoint_every=2, schedule=ScheduleSettings(kind="constant"))
    kept = Checkpoints(str(checkpoints), {}) if checkpoints else None
    train(objective, TinyBatches(), settings, checkpoints=kept, callbacks=[Reports(on_step=reported.append)])
    return objective, [figures_of(point) for point in reported]


def test_two_steps_and_two_more_are_four_bit_for_bit(tiny_encoder: Path, tmp_path: Path) -> None:
    whole, _ = trained(tiny_encoder, 4)
    trained(tiny_encoder, 2, tmp_path)
    resumed, reported = trained(tiny_encoder, 4, tmp_path)
    assert [point["step"] for point in reported] == [3, 4]
    assert all(parameter.device == DEVICE for parameter in resumed.parameters())
    expected = weights_of(whole.cpu())
    for name, value in weights_of(resumed.cpu()).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_run_is_that_of_the_cpu_and_goes_on_there(tiny_encoder: Path, tmp_path: Path) -> None:
    _, expected = trained(tiny_encoder, 4, device=CPU, dropout=0.0)
    _, found = trained(tiny_encoder, 2, tmp_path, dropout=0.0)
    _, later = trained(tiny_encoder, 4, tmp_path, device=CPU, dropout=0.0)
    for point, other in zip([*found, *later], expected, strict=True):
        assert point == pytest.approx(other, rel=1e-3)


def test_a_validation_on_batches_is_that_of_the_cpu(tiny_encoder: Path) -> None:
    settings = BatchValidationSettings(batches="any")
    validation = BatchValidation(settings, [], bf16=False, batches=TinyBatches())
    objective = make_objective(NAME, tiny_encoder, dropout=0.3)
    expected = validation.measure(objective)
    objective = objective.to(DEVICE).train()
    torch.manual_seed(1)
    drawn = torch.rand(3, device=DEVICE).inner
    torch.manual_seed(1)
    assert validation.measure(objective) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(torch.rand(3, device=DEVICE).inner, drawn)
    assert objective.training


def test_a_validation_by_search_is_that_of_the_cpu(tiny_encoder: Path, tmp_path: Path) -> None:
    encoder = encoder_settings(spread(tiny_encoder, tmp_path / "encoder"))
    settings = RetrievalValidationSettings(collection=make_collection(tmp_path))
    expected, found = (
        build_validation(settings, bf16=False, epoch_ends=[1]).measure(PairObjective(load(encoder)).to(device))
        for device in (CPU, DEVICE)
    )
    assert found == pytest.approx(expected, abs=0.02)


def test_embeddings_are_those_of_the_cpu(tiny_encoder: Path) -> None:
    encoder = load(encoder_settings(tiny_encoder)).eval()
    expected = encode_texts(encoder, TEXTS, "document", token_budget=40)
    found = encode_texts(encoder.to(DEVICE), TEXTS, "document", token_budget=40)
    np.testing.assert_allclose(found, expected, atol=1e-6)
