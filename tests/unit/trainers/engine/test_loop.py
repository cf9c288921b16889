import json
import math
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from pipelines.batches import epoch_permutation
from raytriever.errors import UserError
from tests.unit.trainers.tiny import (
    Reports,
    TinyBatches,
    assert_same,
    random_batch,
    tiny_objective,
    tiny_settings,
    weights_of,
)
from trainers.engine import loop
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.early_stopping import Criterion
from trainers.engine.loop import train
from trainers.engine.settings import OptimizerSettings, ScheduleSettings, TrainingSettings
from trainers.objective import Objective, Outcome
from trainers.record.run_log import without_times


def run(settings, folder=None, dropout=0.3, batches=None, kept=2, validation=None, **told):
    objective = tiny_objective(dropout, chunk_size=2, gradient_cache=True)
    reports: list[dict[str, Any]] = []
    checkpoints = Checkpoints(str(folder), {"encoder": "tiny"}, keep=kept) if folder else None
    callbacks = [Reports(on_step=reports.append, **told)]
    source = batches or TinyBatches()
    train(objective, source, settings, validation=validation, checkpoints=checkpoints, callbacks=callbacks)
    return objective, reports


@pytest.fixture
def one_reader(monkeypatch):
    """Batches are read in the order of their steps; more threads read some at once."""
    monkeypatch.setattr(loop, "TOKENIZING_THREADS", 1)


@pytest.mark.usefixtures("one_reader")
def test_the_steps_of_a_run():
    batches = TinyBatches(counts=(9, 8))
    _, reports = run(tiny_settings(), batches=batches)
    assert [(r["step"], r["epoch"]) for r in reports] == [(n, (n - 1) // 4) for n in range(1, 9)]
    expected = [(e, int(b)) for e, count in ((0, 9), (1, 8)) for b in epoch_permutation(0, e, count)[:8]]
    assert batches.reads == expected
    assert [r["learning_rate"] for r in reports] == [0.005] + [0.01] * 7
    assert {r["examples"] for r in reports} == {12}
    assert all(0 <= r["waiting_seconds"] < r["seconds"] for r in reports)


@pytest.mark.usefixtures("one_reader")
def test_steps_may_be_of_batches_that_are_equally_long():
    batches = TinyBatches(counts=(9, 8))
    run(tiny_settings(group_by_length=True), batches=batches)
    steps = [batches.reads[first : first + 2] for first in range(0, 16, 2)]
    assert {epoch for step in steps[:4] for epoch, _ in step} == {0}
    for of_epoch in (steps[:4], steps[4:]):
        spans = sorted(sorted(batches.stored_bytes(*batch) for batch in step) for step in of_epoch)
        assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(spans))


def test_five_steps_and_five_more_are_ten_bit_for_bit(tmp_path):
    settings = tiny_settings(checkpoint_every=2)
    whole, expected = run(settings.model_copy(update={"max_steps": 8}))
    run(settings.model_copy(update={"max_steps": 5}), tmp_path)
    torch.rand(17)  # what the process drew in between is nobody's business
    resumed, reports = run(settings.model_copy(update={"max_steps": 8}), tmp_path)
    assert [r["step"] for r in reports] == [6, 7, 8]
    assert [without_times(r) for r in reports] == [without_times(r) for r in expected[5:]]
    assert_same(weights_of(resumed), weights_of(whole))


def test_an_epoch_boundary_is_no_boundary_for_resuming_and_a_finished_run_takes_no_step(tmp_path):
    whole, _ = run(tiny_settings())
    run(tiny_settings(epochs=1), tmp_path)
    for epochs in ([1] * 4, []):
        resumed, reports = run(tiny_settings(epochs=2), tmp_path)
        assert [r["epoch"] for r in reports] == epochs
        assert_same(weights_of(resumed), weights_of(whole))


def test_checkpoints_are_made_at_their_interval_and_at_the_end(tmp_path):
    done: list[int] = []

    run(tiny_settings(checkpoint_every=3), tmp_path, on_checkpoint=done.append)
    assert done == [3, 6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


LINEAR = ScheduleSettings(kind="linear")
FASTER = OptimizerSettings(learning_rate=0.5)


@pytest.mark.parametrize(("first", "then", "said"), [
    ({"max_steps": 3}, {"seed": 1}, "training.seed: 0 there, 1 now"),
    ({"max_steps": 3}, {"batches_per_step": 4}, "training.batches_per_step: 2 there, 4 now"),
    ({"max_steps": 3}, {"optimizer": FASTER}, "training.optimizer.learning_rate: 0.01 there, 0.5"),
    ({"max_steps": 3, "schedule": LINEAR}, {"schedule": LINEAR}, "training.total_steps: 3 there, 8 now"),
    ({"max_steps": 6}, {"max_steps": 4}, "made after 6 steps, but this run has only 4"),
])  # fmt: skip
def test_resuming_with_other_settings_is_refused(tmp_path, first, then, said):
    """A schedule that depends on the length can't be prolonged."""
    run(tiny_settings(**first), tmp_path)
    with pytest.raises(UserError, match=said):
        run(tiny_settings(**then), tmp_path)


def test_resuming_on_other_batches_is_refused(tmp_path):
    run(tiny_settings(max_steps=3), tmp_path)
    with pytest.raises(UserError, match=r"inputs.batches: aaaaaaaaaaaa there, bbbbbbbbbbbb now"):
        run(tiny_settings(), tmp_path, batches=TinyBatches(fingerprint="b" * 64))


class Scripted:
    """A validation that measures what it is told, call by call, and notes when it was asked."""

    criteria: ClassVar = [Criterion("score", higher_is_better=True)]

    def __init__(self, *scores: float, every: int = 2, patience: int | None = None) -> None:
        self.scores = list(scores)
        self.every, self.patience = every, patience
        self.weights: list[dict[str, np.ndarray]] = []

    def measure(self, objective):
        self.weights.append(weights_of(objective))
        return {"score": self.scores.pop(0)}


def test_a_validated_run_ends_as_it_was_at_its_best(tmp_path):
    validation = Scripted(0.9, 0.1, 0.5, 0.3, 0.4)
    evaluations = []
    objective, reports = run(
        tiny_settings(checkpoint_every=3), tmp_path, validation=validation, on_evaluation=evaluations.append
    )
    assert [(e.step, e.measures["score"]) for e in evaluations] == [(0, 0.9), (2, 0.1), (4, 0.5), (6, 0.3), (8, 0.4)]
    assert len(reports) == 8
    assert_same(weights_of(objective), validation.weights[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006", "step-00000008"]


def test_a_plateau_of_the_evaluations_lowers_the_rate():
    schedule = ScheduleSettings(kind="plateau", factor=0.5, patience=0, warmup_steps=0)
    _, reports = run(tiny_settings(schedule=schedule), validation=Scripted(0.5, 0.6, 0.4, 0.3, 0.2))
    peak = reports[0]["learning_rate"]
    assert [report["learning_rate"] / peak for report in reports] == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_a_step_takes_its_waiting_and_its_work_and_no_evaluation(monkeypatch, logged):
    """By a clock that reading, a step and an evaluation move."""
    now = [0.0]

    def taking(seconds, function):
        def slow(*given):
            now[0] += seconds
            return function(*given)

        return slow

    def read(one, steps, *_):
        yield from ((step, taking(2.0, one)(step)) for step in steps)

    validation, evaluations = Scripted(*[0.5] * 5), []
    measures = dict.fromkeys("bcde", 0.25)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "prefetched", read)
    monkeypatch.setattr(loop, "compute_gradients", taking(3.0, loop.compute_gradients))
    monkeypatch.setattr(validation, "measure", taking(50.0, lambda _: {"score": validation.scores.pop(0), **measures}))
    _, reports = run(tiny_settings(), validation=validation, on_evaluation=evaluations.append)
    assert [(point["waiting_seconds"], point["seconds"]) for point in reports] == [(2.0, 5.0)] * 8
    assert [evaluation.seconds for evaluation in evaluations] == [50.0] * 5
    assert "  after 2 steps: score 0.5000, b 0.2500, c 0.2500, d 0.2500 (50.0 s)" in logged


def test_a_run_stops_when_patience_is_at_its_end_and_stays_stopped(tmp_path):
    objective, reports = run(tiny_settings(), tmp_path, validation=Scripted(0.0, 0.5, 0.4, 0.3, 0.9, patience=2))
    assert reports[-1]["step"] == 6
    again, reports = run(tiny_settings(), tmp_path, validation=Scripted(patience=2))
    assert reports == []
    assert_same(weights_of(again), weights_of(objective))


def test_an_interrupted_validated_run_goes_on_as_if_nothing_had_happened(tmp_path):
    scores = (0.0, 0.5, 0.4, 0.3, 0.2)
    whole, _ = run(tiny_settings(), tmp_path / "whole", validation=Scripted(*scores))

    class Killed(Exception):
        pass

    def stop(step: int) -> None:
        if step == 6:
            raise Killed

    with pytest.raises(Killed):
        run(tiny_settings(), tmp_path / "killed", validation=Scripted(*scores), on_checkpoint=stop)
    asked = Scripted(*scores[3:])
    resumed, reports = run(tiny_settings(), tmp_path / "killed", validation=asked)
    assert asked.scores == []
    assert reports[0]["step"] == 5
    assert_same(weights_of(resumed), weights_of(whole))
    one, other = (
        json.loads((tmp_path / run / "step-00000008/checkpoint.json").read_text()) for run in ("whole", "killed")
    )
    for record in (one, other):
        for evaluation in record["evaluations"]:
            del evaluation["seconds"]
    assert one == other


class Poisoned(Objective[bool]):
    """Its loss, or only its gradient, is not finite for the batch that begins with ``text``."""

    columns = ("query",)

    def __init__(self, text: str = "", poison: str = "loss") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.text, self.poison = text, poison

    def collate(self, rows):
        return rows["query"][0].as_py() == self.text

    def forward(self, batch):
        loss = self.weight * 1.0
        if batch and self.poison == "loss":
            loss = loss * math.nan
        elif batch:
            loss = 1 + (loss - loss.detach()).sqrt()  # one, with an infinite slope
        return Outcome(loss, {}, 1)

    def comparisons(self, rows):
        raise NotImplementedError

    def encoder(self, role):
        raise NotImplementedError

    def export(self, folder):
        raise NotImplementedError


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_names_its_batch_and_how_to_look_at_it(poison):
    step, other = (int(batch) for batch in epoch_permutation(0, 1, 8)[2:4])
    objective = Poisoned(random_batch(1000 + other)["query"][0].as_py(), poison)
    kept = []
    notes = Reports(on_step=lambda _: kept.append(objective.weight.item()))
    with pytest.raises(UserError) as stopped:
        train(objective, TinyBatches(), tiny_settings(), callbacks=[notes])
    look = "Look at it with: raytriever show tiny/batches --epoch 1 --batch"
    if poison == "loss":
        assert f"step 6: the loss is nan for batch {other} of epoch 1" in str(stopped.value)
        assert f"{look} {other}." in str(stopped.value)
    else:
        assert f"step 6: the norm of the gradient is inf for batches {step}, {other} of epoch 1" in str(stopped.value)
        assert f"{look} {step}." in str(stopped.value)
    assert len(kept) == 5
    assert objective.weight.item() == kept[-1]


def test_bf16_auto_must_be_resolved():
    with pytest.raises(UserError, match="bf16 is still 'auto'"):
        run(TrainingSettings())
    assert TrainingSettings().resolved().bf16 in (True, False)
    assert TrainingSettings(bf16=True).resolved().bf16 is True


def test_settings_are_frozen_and_refuse_unknown_keys():
    with pytest.raises(ValidationError):
        TrainingSettings(batch_per_step=3)
    with pytest.raises(ValidationError):
        TrainingSettings().seed = 3


@pytest.mark.parametrize(("schedule", "said"), [
    ({"warmup_steps": 100}, "warmup_steps is 100"), ({"kind": "plateau"}, "depends on evaluations"),
])  # fmt: skip
def test_a_schedule_that_does_not_fit_the_run_is_refused(schedule, said):
    with pytest.raises(UserError, match=said):
        run(tiny_settings(schedule=ScheduleSettings(**schedule)))
