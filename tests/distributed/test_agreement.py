"""Ranks that differ are named before the first step, on every rank."""

from raytriever.errors import UserError
from tests.distributed.processes import run_in_processes
from tests.unit.trainers.tiny import tiny_objective
from trainers.engine.collectives import check_ranks_agree


def refusal(rank: int, batches: list[str], steps: list[int], frozen: list[bool]) -> str:
    objective = tiny_objective()
    if frozen[rank]:
        objective.encoder("query").projection.requires_grad_(False)
    try:
        check_ranks_agree(objective, batches[rank], steps[rank])
    except UserError as error:
        return str(error)
    return ""


def ask(
    batches: tuple[str, str] = ("a" * 64, "a" * 64),
    steps: tuple[int, int] = (8, 8),
    frozen: tuple[bool, bool] = (False, False),
) -> str:
    """What both ranks said, which is the same."""
    first, second = run_in_processes(refusal, 2, batches, steps, frozen)
    assert first == second
    return str(first)


def test_equal_ranks_agree() -> None:
    assert ask() == ""


def test_other_batches_are_refused_by_fingerprint() -> None:
    said = ask(batches=("a" * 64, "b" * 64))
    assert said.startswith("The ranks differ in batches: aaaaaaaaaaaa on rank 0; bbbbbbbbbbbb on rank 1.")


def test_another_length_and_other_weights_are_refused() -> None:
    assert "differ in steps: 8 on rank 0; 1,000 on rank 1" in ask(steps=(8, 1000))
    assert "differ in trainable parameters" in ask(frozen=(False, True))
