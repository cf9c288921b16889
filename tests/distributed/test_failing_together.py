"""What the first rank does alone before the first step: where it fails, every rank says so, in the same words."""

import sys
from types import SimpleNamespace

import pytest
import torch

from raytriever.errors import StorageError, UserError
from tests.distributed.processes import run_each
from tests.unit.trainers.triplet_batches import store_triplets
from trainers.engine.collectives import failing_together, gather_lines
from trainers.jobs import workers
from trainers.jobs.train import Train, TrainConfig
from trainers.training_run import run_training

CPU = torch.device("cpu")


def refused(train, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        train(*arguments)
    return str(caught.value)


def refusals(rank: int, settings: dict) -> list[str]:
    """Of the batches, which only the first rank looks at beforehand, and of a tracker, which it alone opens."""
    sys.modules["wandb"] = None  # as if it weren't installed
    config = TrainConfig.model_validate(settings)
    with_tracker = config.model_copy(update={"tracking": config.tracking.model_copy(update={"trackers": ("wandb",)})})
    return [refused(run_training, config, config.located(), config.output, CPU), refused(work, rank, with_tracker)]


def work(rank: int, config: TrainConfig) -> None:
    """As a worker of Ray Train, without Ray."""
    workers.get_device = lambda: CPU
    workers.ray.train.get_context = lambda: SimpleNamespace(get_world_size=lambda: 2, get_world_rank=lambda: rank)
    board = SimpleNamespace(actor=SimpleNamespace(put_nowait=SimpleNamespace(remote=lambda _: None)))
    derivation = Train(config).derivation()
    arguments = {"settings": config, "tracking": config.tracking, "output": config.output, "derivation": derivation}
    workers.train_on_worker(arguments | {"board": board, "threads": 1})


def sent(rank: int, lines: list[str]) -> list[str]:
    return gather_lines(lines[rank], CPU)


def test_what_the_first_rank_finds_ends_both_and_a_line_of_any_text_arrives_as_one(tmp_path, tiny_encoder) -> None:
    """A path may hold bytes that are no text, and a document's id a separator of lines."""
    batches = store_triplets(tmp_path / "batches", doubled={(0, number) for number in range(4)})
    settings = {
        "output": str(tmp_path / "model"), "batches": batches, "objective": {"kind": "adaptive_margin"},
        "encoder": {"model": str(tiny_encoder), "pooling": "mean"},
        "training": {"bf16": False, "batches_per_step": 2},
    }  # fmt: skip
    lines = ["", "a\u2028b\x1c漢 \udcff"]
    (first, second), gathered = run_each(2, (refusals, settings), (sent, lines))
    assert gathered == [["", "a\u2028b\x1c漢 \\udcff"]] * 2
    assert first == second
    assert "has 2 hard negatives; a triplet has exactly one" in first[0]
    assert "tracking.trackers names wandb, whose package isn't installed" in first[1]


def test_storage_that_fails_is_left_to_its_rank() -> None:
    with pytest.raises(StorageError), failing_together(CPU):
        raise StorageError("s3://full: no room")
