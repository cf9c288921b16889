"""Ranks that differ are named before the first step, on every rank."""

from raytriever.errors import UserError
from tests.distributed.processes import run_each
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


EQUAL = (["a" * 64] * 2, [8, 8], [False, False])  # batches, steps, and what is frozen, of two ranks
SAID = {
    "": EQUAL,
    "The ranks differ in batches: aaaaaaaaaaaa on rank 0; bbbbbbbbbbbb on rank 1.": (["a" * 64, "b" * 64], *EQUAL[1:]),
    "differ in steps: 8 on rank 0; 1,000 on rank 1": (EQUAL[0], [8, 1000], EQUAL[2]),
    "differ in trainable parameters": (*EQUAL[:2], [False, True]),
}


def test_ranks_that_differ_are_told_in_what() -> None:
    answers = run_each(2, *((refusal, *ranks) for ranks in SAID.values()))
    for said, (first, second) in zip(SAID, answers, strict=True):
        assert first == second
        assert said in first if said else first == ""
