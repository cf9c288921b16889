"""An evaluation on a GPU says what one on the CPU says."""

from pathlib import Path

import pytest
import torch

from tests.unit.trainers.validation.made_up import PairObjective, encoder_settings, load, make_collection
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_search_as_on_the_cpu(spread_encoder: Path, tmp_path: Path, bf16: bool) -> None:
    settings = RetrievalValidationSettings(collection=make_collection(tmp_path), others=("RR@10", "AP"))
    expected = build_validation(settings, bf16=False, epoch_ends=[1]).measure(PairObjective(_encoder(spread_encoder)))
    objective = PairObjective(_encoder(spread_encoder)).to("cuda").train()
    torch.cuda.manual_seed(1)
    drawn = torch.rand(3, device="cuda")
    validation = build_validation(settings, bf16=bf16, epoch_ends=[1])
    torch.cuda.manual_seed(1)
    found = validation.measure(objective)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert found == validation.measure(objective)
    assert list(found) == list(expected)
    if not bf16:  # rounding differs, so that two neighbours may change places
        assert found == pytest.approx(expected, abs=0.02)


def _encoder(folder: Path) -> torch.nn.Module:
    return load(encoder_settings(folder))
