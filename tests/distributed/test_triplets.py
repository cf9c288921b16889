"""Objectives of triplets over ranks: batches of their own, slices of one batch, negatives of the whole step."""

import pytest
import torch

from tests.distributed.processes import assert_close, run_each
from tests.unit.trainers.tiny import Reports, TinyEncoder, figures_of, gradients_of, tiny_settings
from tests.unit.trainers.triplet_batches import TripletBatches
from trainers.engine.loop import train
from trainers.objectives.adaptive_margin import AdaptiveMargin
from trainers.objectives.margin_mse import MarginMse
from trainers.objectives.pair_settings import AdaptiveMarginSettings, MarginMseSettings

FORMS = [
    {"target": "static", "margin": 0.3},
    {"target": "adaptive"},
    {"target": "adaptive", "in_batch": True},
    {"target": "adaptive", "in_batch": True, "pairing": "released", "share_negatives": "step"},
    {"target": "distributed"},
    {"target": "distributed", "share_negatives": "step"},
    {"target": "distributed", "pairing": "released"},
]


def one_step(rank: int, batches_per_step: int):  # noqa: ARG001
    """Gradients and figures of a step of each form, and of MarginMSE."""
    chunks = {"chunk_size": 2, "gradient_cache": True}
    objectives = [
        *(AdaptiveMargin(tiny_encoder(), AdaptiveMarginSettings(**form, **chunks)) for form in FORMS),
        MarginMse(tiny_encoder(), MarginMseSettings(**chunks)),
    ]
    found = []
    for objective in objectives:
        settings = tiny_settings(batches_per_step=batches_per_step, max_steps=1, schedule={"kind": "constant"})
        reports = []
        train(objective, TripletBatches(), settings, callbacks=[Reports(on_step=reports.append)])
        found.append((gradients_of(objective), figures_of(reports[0])))
    return found


def tiny_encoder() -> TinyEncoder:
    torch.manual_seed(7)
    return TinyEncoder().double()


@pytest.fixture(scope="module")
def alone():
    """Of one process, by batches per step."""
    return {batches_per_step: one_step(0, batches_per_step) for batches_per_step in (1, 2, 4)}


@pytest.mark.parametrize(
    ("ranks", "batches_per_step"),
    [
        pytest.param(2, [2, 1, 4], id="a batch each, slices of one batch, two batches each"),
        pytest.param(4, [2], id="slices of two batches", marks=pytest.mark.slow),
    ],
)
def test_world_size_changes_nothing(alone, ranks, batches_per_step):
    answers_of_all = run_each(ranks, *((one_step, number) for number in batches_per_step))
    for number, answers in zip(batches_per_step, answers_of_all, strict=True):
        for answer in answers:
            for (found, told), (expected, measured) in zip(answer, alone[number], strict=True):
                assert_close(found, expected, number, rtol=1e-12, of_own=1e-12)
                assert told["loss"] == pytest.approx(measured["loss"], rel=1e-6)
                assert told["examples"] == measured["examples"]
                assert told == pytest.approx(measured, rel=1e-5)


def test_sharing_negatives_over_a_step_changes_the_loss(alone):
    (_, own), (_, shared) = alone[2][4:6]
    assert own["target_max"] <= shared["target_max"]
    assert own["loss"] != pytest.approx(shared["loss"], rel=1e-6)
