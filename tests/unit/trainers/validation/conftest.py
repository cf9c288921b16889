from pathlib import Path

import pytest

from tests.unit.trainers.validation.made_up import spread


@pytest.fixture(scope="session")
def spread_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """A tiny encoder whose rankings don't hang on the last bit."""
    return spread(tiny_encoder, tmp_path_factory.mktemp("spread") / "encoder")
