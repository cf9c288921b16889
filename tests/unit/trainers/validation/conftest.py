from pathlib import Path

import pytest

from tests.unit.trainers.validation.made_up import PairObjective, encoder_settings, load, spread


@pytest.fixture(scope="session")
def spread_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """A tiny encoder whose rankings don't hang on the last bit."""
    return spread(tiny_encoder, tmp_path_factory.mktemp("spread") / "encoder")


@pytest.fixture
def objective(spread_encoder: Path) -> PairObjective:
    """In training mode, but for its part that stays in evaluation mode."""
    made = PairObjective(load(encoder_settings(spread_encoder))).train()
    made.frozen.eval()
    return made
