"""What every kind of objective is checked for where it is built."""

from pathlib import Path

import pytest

from raytriever.errors import UserError
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from trainers.objective import build_objective
from trainers.objectives.pair_settings import ContrastiveSettings


@pytest.mark.parametrize("key", ["query_max_length", "document_max_length"])
def test_lengths_that_leave_nothing_of_a_text_are_refused_by_name(tiny_encoder: Path, key: str):
    towers = load_towers(EncoderSettings(model=str(tiny_encoder), pooling="cls"), tiny_encoder, "f" * 64)
    for wanted in (1, 2):
        with pytest.raises(UserError, match=rf"objective\.{key} is {wanted}, but the tokenizer puts 2 special tokens"):
            build_objective(ContrastiveSettings.model_validate({key: wanted}), towers)
    objective = build_objective(ContrastiveSettings.model_validate({key: 3}), towers)
    assert objective.encoder("query") is towers.query
