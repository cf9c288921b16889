"""Revela on two ranks, replicated and with both models shared out, against one process with both batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.towers import Towers
from tests.distributed.processes import assert_close, run_each, summed
from tests.unit.retrieval.encoders.tiny_models import load_tiny, save_tiny_model
from tests.unit.trainers.chunk_batches import chunk_table
from trainers.engine.sharding import is_sharded, shard
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.objectives.revela.objective import Revela

LANGUAGE_MODEL = "objective.language_model"
CASES: list[dict[str, Any]] = [
    {},
    {"chunk_size": 2, "gradient_cache": True, "language_model": {"activation_checkpointing": True}},
    {"language_model": {"lora": {"rank": 2, "targets": "all_linear"}}},
]


def gradients(folders: tuple[Path, Path], batches: list[int], case: dict[str, Any], *, sharded: bool) -> Any:
    """Of these batches, in float64."""
    retriever, language_model = folders
    model = {"model": str(language_model)} | case.get("language_model", {})
    values = {"similarity_temperature": 0.1, **case, "language_model": model}
    encoder, located = load_tiny(retriever, pooling="mean"), locate_model(str(language_model))
    objective = Revela.build(RevelaSettings(**values), Towers(encoder, encoder), {LANGUAGE_MODEL: located}, 0)
    objective = objective.double().train()
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if sharded:
        shard(objective)
        assert is_sharded(objective.language_model)
    return summed(objective, (objective.collate(chunk_table(number)) for number in batches))


def of_rank(rank: int, folders: tuple[Path, Path], sharded: bool) -> list[Any]:
    return [gradients(folders, [rank], case, sharded=sharded) for case in CASES]


@pytest.mark.usefixtures("one_thread")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    folders = (
        save_tiny_model("bert", tmp_path / "bert"),
        save_tiny_model("llama", tmp_path / "lm", language_model=True),
    )
    alone = [gradients(folders, [0, 1], case, sharded=False) for case in CASES]
    for answers in run_each(2, (of_rank, folders, False), (of_rank, folders, True)):  # replicated, then sharded
        for case, (loss, expected), *found in zip(CASES, alone, *answers, strict=True):
            assert sum(loss_of_rank for loss_of_rank, _ in found) == pytest.approx(loss, rel=1e-12)
            for _, of_one in found:
                assert_close(of_one, expected, case, rtol=1e-9, atol=1e-11)
