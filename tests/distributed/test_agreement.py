"""Before the first step: ranks that differ are told in what, start alike, and fail together, in the same words."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raytriever.errors import StorageError
from tests.distributed.processes import assert_close, refused, run_each
from tests.unit.trainers.tiny import TinyBatches, tiny_objective, tiny_settings, weights_of
from tests.unit.trainers.triplet_batches import store_triplets
from trainers.engine.collectives import check_ranks_agree, failing_together, gather_lines
from trainers.engine.loop import train
from trainers.jobs import workers
from trainers.jobs.train import Train, TrainConfig
from trainers.training_run import run_training

CPU = torch.device("cpu")


def differing(rank: int, batches: list[str], steps: list[int], frozen: list[bool]) -> str:
    objective = tiny_objective()
    if frozen[rank]:
        objective.encoder("query").projection.requires_grad_(False)
    return refused(check_ranks_agree, objective, batches[rank], steps[rank])


def run_from_apart(rank: int) -> dict[str, np.ndarray]:
    objective = tiny_objective()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.1 * rank)
    train(objective, TinyBatches(), tiny_settings())
    return weights_of(objective)


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
    board = SimpleNamespace(post=SimpleNamespace(remote=lambda _: None))
    derivation = Train(config).derivation()
    arguments = {"settings": config, "tracking": config.tracking, "output": config.output, "derivation": derivation}
    workers.train_on_worker(arguments | {"board": board, "threads": 1})


def sent(rank: int, lines: list[str]) -> list[str]:
    return gather_lines(lines[rank], CPU)


EQUAL = (["a" * 64] * 2, [8, 8], [False, False])  # batches, steps, and what is frozen, of two ranks
DIFFERING = {
    "": EQUAL,
    "The ranks differ in batches: aaaaaaaaaaaa on rank 0; bbbbbbbbbbbb on rank 1.": (["a" * 64, "b" * 64], *EQUAL[1:]),
    "differ in steps: 8 on rank 0; 1,000 on rank 1": (EQUAL[0], [8, 1000], EQUAL[2]),
    "differ in trainable parameters": (*EQUAL[:2], [False, True]),
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, tiny_encoder):
    """What two ranks answer to each of these calls."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "output": str(folder / "model"), "objective": {"kind": "adaptive_margin"},
        "batches": store_triplets(folder / "batches", doubled={(0, number) for number in range(4)}),
        "encoder": {"model": str(tiny_encoder), "pooling": "mean"},
        "training": {"bf16": False, "batches_per_step": 2},
    }  # fmt: skip
    calls = {
        **{said: (differing, *ranks) for said, ranks in DIFFERING.items()},
        "start apart": (run_from_apart,),
        "lines": (sent, ["", "a\u2028b\x1c漢 \udcff"]),
        "refusals": (refusals, settings),
    }
    return dict(zip(calls, run_each(2, *calls.values()), strict=True))


@pytest.mark.parametrize("said", DIFFERING)
def test_ranks_that_differ_are_told_in_what(of_two, said: str) -> None:
    first, second = of_two[said]
    assert first == second
    assert said in first if said else first == ""


@pytest.mark.usefixtures("one_thread")
def test_ranks_that_start_apart_end_as_the_first_alone(of_two) -> None:
    one, other = of_two["start apart"]
    assert_close(other, one, rtol=0)
    assert_close(one, run_from_apart(0), rtol=1e-7, atol=2e-6)


def test_what_the_first_rank_finds_ends_both(of_two) -> None:
    first, second = of_two["refusals"]
    assert first == second
    assert "has 2 hard negatives; a triplet has exactly one" in first[0]
    assert "tracking.trackers names wandb, but its package isn't installed" in first[1]


def test_a_line_of_any_text_arrives_as_one(of_two) -> None:
    """A path may hold bytes that are no text, and a document's id a separator of lines."""
    assert of_two["lines"] == [["", "a\u2028b\x1c漢 \\udcff"]] * 2


def test_storage_that_fails_is_left_to_its_rank() -> None:
    with pytest.raises(StorageError), failing_together(CPU):
        raise StorageError("s3://full: no room")
