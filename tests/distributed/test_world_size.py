"""Whole steps of the loop: however many ranks share a step's batches, the weights move the same way."""

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from tests.distributed.processes import run_in_processes
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


def assert_close(found, expected, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "batches_per_step"),
    [(2, 2), (2, 1), (4, 2)],
    ids=["a batch each", "slices of one batch", "slices of two batches"],
)
def test_gradients_of_a_step(ranks, batches_per_step):
    alone = one_step(0, batches_per_step)
    for answers in run_in_processes(one_step, ranks, batches_per_step):
        for (found, _, told), (expected, _, measured), tolerance in zip(answers, alone, (1e-12, 1e-6), strict=True):
            assert_close(found, expected, tolerance)
            assert told[0]["examples"] == 6 * batches_per_step
            assert told[0] == pytest.approx(measured[0], rel=1e-5)
            for name in ("loss", "gradient_norm"):
                assert told[0][name] == pytest.approx(measured[0][name], rel=1e-6)


def test_weights_after_several_steps():
    _, weights, measured = training(0, 2, 4, "float64")
    answers = run_in_processes(training, 2, 2, 4, "float64")
    for _, found, told in answers:
        assert_close(found, weights, 1e-9)
        assert [m["loss"] for m in told] == pytest.approx([m["loss"] for m in measured], rel=1e-6)
    for name, value in answers[0][1].items():
        np.testing.assert_array_equal(answers[1][1][name], value)


def broken_on_one_rank(rank: int):
    objective = tiny_objective()
    if rank == 1:
        forward = objective.forward

        def broken(batch):
            outcome = forward(batch)
            return type(outcome)(outcome.loss * float("nan"), outcome.metrics, outcome.examples)

        objective.forward = broken
    try:
        train(objective, TinyBatches(), tiny_settings())
    except UserError as error:
        return str(error)
    return None


def test_what_is_not_finite_on_one_rank_stops_all_with_the_same_words():
    one, other = run_in_processes(broken_on_one_rank, 2)
    assert one == other
    assert "the loss is nan for batch" in one


def folders_of_their_own(rank: int, folder: str):
    checkpoints = Checkpoints(f"{folder}/{rank}", {})
    try:
        train(tiny_objective(), TinyBatches(), tiny_settings(max_steps=3), checkpoints=checkpoints)
        train(tiny_objective(), TinyBatches(), tiny_settings(max_steps=4), checkpoints=checkpoints)
    except UserError as error:
        return str(error)
    return None


def test_checkpoints_that_not_all_ranks_see_are_refused(tmp_path):
    for message in run_in_processes(folders_of_their_own, 2, str(tmp_path)):
        assert "different checkpoints (steps 3, 0)" in message
