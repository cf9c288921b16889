"""Two ranks share an evaluation and say what one says; where one of them fails, both do, in the same words."""

from pathlib import Path
from typing import Any

import pytest

from retrieval.encoders.multi_vector import MultiVectorEncoder
from retrieval.encoders.specification import VectorForm
from tests.distributed.processes import refused, run_each
from tests.unit.trainers.validation.made_up import (
    MadeUpBatches,
    PairObjective,
    encoder_settings,
    load,
    make_collection,
    spread,
)
from tests.unit.trainers.validation.stages import searched_by_words
from trainers.validation.batches import BatchValidation
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import BatchValidationSettings, RetrievalValidationSettings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> tuple[str, str, str]:
    """Folders of an encoder, a collection and a run."""
    folder = tmp_path_factory.mktemp("shared")
    collection = make_collection(folder)
    run = searched_by_words(collection, folder, "dev", top_k=30)
    return str(spread(tiny_encoder, folder / "encoder")), collection, run


def made(model: str, form: VectorForm | None = None) -> PairObjective:
    objective = PairObjective(load(encoder_settings(model, pooling="cls")))
    if form is not None:
        single, several = objective.text_encoder, MultiVectorEncoder(objective.text_encoder, form)
        objective.encoder = lambda role: single if role == "query" else several
    return objective.train()


KINDS = {"searched": {}, "two vectors a document": {"form": VectorForm(kind="layers", layers=[1, 2])}, "run": {}}
TOKEN_BUDGETS = (60, 5_000)  # many pieces, and a piece for one rank alone


def evaluations(rank: int, model: str, collection: str, run: str):  # noqa: ARG001
    """By kind and token budget: what was measured, twice, and the texts that this rank encoded."""
    found = {}
    for name, changes in KINDS.items():
        for token_budget in TOKEN_BUDGETS:
            objective = made(model, **changes)
            settings = RetrievalValidationSettings(
                collection=collection, token_budget=token_budget, others=("RR@10", "R@10", "AP"),
                run=run if name == "run" else None,
            )  # fmt: skip
            validation = build_validation(settings, bf16=False, epoch_ends=[10])
            measured = [validation.measure(objective) for _ in range(2)]
            assert objective.training
            found[name, token_budget] = (measured, objective.encoded)
    return found


def on_batches(rank: int, model: str):
    """What is measured on so many batches, with which passes, and what two mistakes on the second rank say."""
    settings = BatchValidationSettings(batches="there")

    def measured(count: int, refuses: bool = False) -> tuple[dict[str, float], int]:
        objective, batches = made(model), MadeUpBatches(count)
        if refuses:
            objective.refused = batches.read(0, 3)["query"][0].as_py()
        validation = BatchValidation(settings, settings.criteria([10]), bf16=False, batches=batches)
        return validation.measure(objective), len(objective.draws)

    found: dict[str, object] = {str(count): measured(count) for count in (1, 5, 6)}
    return found | {"refused": refused(measured, 5, rank == 1)}


def infinite_on_the_second(rank: int, model: str, collection: str) -> str:
    objective = made(model)
    if rank == 1:
        forward = objective.text_encoder.forward
        objective.text_encoder.forward = lambda features: forward(features) * float("inf")
    settings = RetrievalValidationSettings(collection=collection, token_budget=60)
    return refused(build_validation(settings, bf16=False, epoch_ends=[10]).measure, objective)


@pytest.fixture(scope="module")
def of_two(world: tuple[str, str, str]) -> list[Any]:
    """What two ranks answer to the evaluations, the batches and the infinite vectors."""
    return run_each(2, (evaluations, *world), (on_batches, world[0]), (infinite_on_the_second, *world[:2]))


def test_ranks_share_the_texts(world, of_two):
    alone = evaluations(0, *world)
    for (kind, token_budget), ((expected, again), texts) in alone.items():
        ranks = [answers[kind, token_budget] for answers in of_two[0]]
        assert again == expected, kind
        assert 0 < expected["AP"] < 1
        assert [measured for measured, _ in ranks] == [[expected, expected]] * 2, kind
        own = [encoded for _, encoded in ranks]
        assert sorted(own[0] + own[1]) == sorted(texts)
        if token_budget == TOKEN_BUDGETS[0]:
            tokens = [sum(map(len, of_rank)) for of_rank in own]
            assert max(tokens) < 1.3 * min(tokens)


def test_ranks_share_the_batches_and_the_mistakes(world, of_two):
    alone = on_batches(0, world[0])
    _, (one, other), (infinite, infinite_too) = of_two
    for name in ("1", "5", "6"):
        expected, _ = alone[name]
        assert one[name] == other[name] == (expected, (int(name) + 1) // 2)
    assert one["refused"] == other["refused"]
    assert "Batch 3 of epoch 0" in one["refused"]
    assert infinite == infinite_too
    assert "beyond half precision" in infinite
