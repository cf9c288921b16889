"""Revela on two ranks, replicated and with both models shared out, against one process with both batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrieval.encoders.pretrained import locate_model
from tests.distributed.processes import run_in_processes
from tests.unit.retrieval.encoders.tiny_models import load_tiny, save_tiny_model
from tests.unit.trainers.chunk_batches import chunk_table
from trainers.engine import collectives
from trainers.engine.sharding import is_sharded, shard, whole
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.objectives.revela.objective import load_revela

CASES: list[dict[str, Any]] = [
    {},
    {"chunk_size": 2, "gradient_cache": True, "language_model": {"activation_checkpointing": True}},
    {"language_model": {"lora": {"rank": 2, "targets": "all_linear"}}},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model("bert", folder / "bert"), save_tiny_model("llama", folder / "lm", language_model=True)


def gradients(folders: tuple[Path, Path], batches: list[int], case: dict[str, Any], *, sharded: bool) -> Any:
    """The sum of these batches' losses, and its gradients, float64, summed over the ranks that run."""
    torch.set_num_threads(1)
    retriever, language_model = folders
    model = {"model": str(language_model)} | case.get("language_model", {})
    values = {"similarity_temperature": 0.1, **case, "language_model": model}
    objective = load_revela(
        load_tiny(retriever, pooling="mean"), RevelaSettings(**values), locate_model(str(language_model)), seed=0
    )
    objective = objective.double().train()
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if sharded:
        shard(objective)
        assert is_sharded(objective.language_model)
    losses = []
    for number in batches:
        loss = objective(objective.collate(chunk_table(number))).loss
        loss.backward()
        losses.append(loss.item())
    trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    with collectives.GradientSum(trained.values()):
        pass  # all are complete
    return sum(losses), {name: whole(p.grad).numpy() for name, p in trained.items() if p.grad is not None}


def of_rank(rank: int, folders: tuple[Path, Path], sharded: bool) -> list[Any]:
    return [gradients(folders, [rank], case, sharded=sharded) for case in CASES]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_two_ranks_equal_one(folders: tuple[Path, Path], sharded: bool) -> None:
    answers = run_in_processes(of_rank, 2, folders, sharded)
    for number, case in enumerate(CASES):
        loss, expected = gradients(folders, [0, 1], case, sharded=False)
        assert sum(answer[number][0] for answer in answers) == pytest.approx(loss, rel=1e-12)
        for answer in answers:
            found = answer[number][1]
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                np.testing.assert_allclose(found[name], gradient, rtol=1e-9, atol=1e-11, err_msg=f"{case} {name}")
