"""Whole steps of the loop: however many ranks share a step's batches, the weights move the same way."""

import pytest
import torch

from tests.distributed.processes import assert_close, refused, run_each, run_in_processes
from tests.unit.trainers.tiny import (
    Reports,
    TinyBatches,
    figures_of,
    gradients_of,
    tiny_objective,
    tiny_settings,
    weights_of,
)
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train


def training(rank: int, batches_per_step: int, steps: int, dtype_name: str):  # noqa: ARG001
    objective = tiny_objective(dtype=getattr(torch, dtype_name), chunk_size=2, gradient_cache=True)
    reports = []
    settings = tiny_settings(batches_per_step=batches_per_step, max_steps=steps, schedule={"kind": "constant"})
    train(objective, TinyBatches(), settings, callbacks=[Reports(on_step=reports.append)])
    points = [figures_of(point) for point in reports]
    return gradients_of(objective), weights_of(objective), points


def one_step(rank: int, batches_per_step: int):
    return [training(rank, batches_per_step, 1, dtype) for dtype in ("float64", "float32")]


def broken_on_one_rank(rank: int):
    objective = tiny_objective()
    if rank == 1:
        forward = objective.forward

        def broken(batch):
            outcome = forward(batch)
            return type(outcome)(outcome.loss * float("nan"), outcome.metrics, outcome.examples)

        objective.forward = broken
    return refused(train, objective, TinyBatches(), tiny_settings())


def folders_of_their_own(rank: int, folder: str):
    def training(steps: int) -> None:
        checkpoints = Checkpoints(f"{folder}/{rank}", {})
        train(tiny_objective(), TinyBatches(), tiny_settings(max_steps=steps), checkpoints=checkpoints)

    training(3)
    return refused(training, 4)


def assert_equal_steps(answers, alone, batches_per_step: int) -> None:
    for answer in answers:
        for (found, _, told), (expected, _, measured), tolerance in zip(answer, alone, (1e-12, 1e-6), strict=True):
            assert_close(found, expected, batches_per_step, rtol=tolerance, of_own=tolerance)
            assert told[0]["examples"] == 6 * batches_per_step
            assert told[0] == pytest.approx(measured[0], rel=1e-5)
            for name in ("loss", "gradient_norm"):
                assert told[0][name] == pytest.approx(measured[0][name], rel=1e-6)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory):
    """What two ranks answer to each of these calls."""
    calls = {
        "a batch each": (one_step, 2),
        "slices of one batch": (one_step, 1),
        "several steps": (training, 2, 4, "float64"),
        "not finite": (broken_on_one_rank,),
        "folders": (folders_of_their_own, str(tmp_path_factory.mktemp("folders"))),
    }
    return dict(zip(calls, run_each(2, *calls.values()), strict=True))


def test_gradients_of_a_step(of_two):
    of_two_batches = one_step(0, 2)
    assert_equal_steps(of_two["a batch each"], of_two_batches, 2)
    assert_equal_steps(of_two["slices of one batch"], one_step(0, 1), 1)
    assert_equal_steps(run_in_processes(one_step, 4, 2), of_two_batches, 2)  # slices of two batches


def test_weights_after_several_steps(of_two):
    _, weights, measured = training(0, 2, 4, "float64")
    for _, found, told in of_two["several steps"]:
        assert_close(found, weights, rtol=1e-9, of_own=1e-9)
        assert [m["loss"] for m in told] == pytest.approx([m["loss"] for m in measured], rel=1e-6)
    (_, one, _), (_, other, _) = of_two["several steps"]
    assert_close(other, one, rtol=0)


def test_what_is_not_finite_on_one_rank_stops_all_with_the_same_words(of_two):
    one, other = of_two["not finite"]
    assert one == other
    assert "the loss is nan for batch" in one


def test_checkpoints_that_not_all_ranks_see_are_refused(of_two):
    for message in of_two["folders"]:
        assert "different checkpoints (steps 3, 0)" in message
