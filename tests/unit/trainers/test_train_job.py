"""The job of training: what it refuses and warns of with its settings, and what it says of a trained model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from raytriever.artifacts.artifact import Artifact, ShardRecord
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.reports.progress import ProgressLine
from raytriever.settings.configuration import validate
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Shard
from retrieval.encoders.specification import EncoderContract
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from tests.unit.small_run import make_artifact
from trainers.engine import settings as engine_settings
from trainers.engine.early_stopping import Evaluation, State, Trained
from trainers.engine.order import Order, can_share
from trainers.jobs.train import Train, TrainConfig
from trainers.jobs.train_checks import check_slices, check_workers
from trainers.record.run_log import RunLog
from trainers.training_run import ShownProgress, _facts, load_for_training, write_model

SETTINGS = {
    "output": "run/model",
    "batches": "run/batches",
    "encoder": {"model": "any"},
    "objective": {"kind": "contrastive"},
    "training": {"bf16": False},
    "validation": {"kind": "retrieval", "collection": "run/corpus", "split": "test"},
}


def stage(**changes) -> Train:
    return Train(validate(TrainConfig, SETTINGS | changes, "model"))


def evaluation(split: str) -> Evaluate:
    config = {"output": "run/evaluation", "collection": "run/corpus", "split": split, "runs": {"a": "run/a"}}
    return Evaluate(validate(EvaluateConfig, config, "evaluation"))


def test_a_dev_set_that_is_also_evaluated_is_warned_of(logged: list[str]) -> None:
    stage().check_settings({"evaluation": evaluation("test")})
    (warning,) = logged
    assert "the dev set is also a test set of this run. Split 'test'" in warning
    stage().check_settings({"evaluation": evaluation("held_out")})
    stage(validation=None).check_settings({"evaluation": evaluation("test")})
    assert logged == [warning]


@pytest.mark.parametrize("resources", [{"workers": 2, "gpus_per_worker": 0.5}, {"workers": 1, "gpus_per_worker": 1.5}])
def test_a_training_worker_has_a_gpu_of_its_own_and_no_more(resources: dict[str, float]):
    training = {"bf16": False, "batches_per_step": 2}
    why = "NCCL refuses" if resources["workers"] == 2 else "a worker trains on one GPU"
    said = rf"resources\.gpus_per_worker is {resources['gpus_per_worker']}, but {why}.*Set it to 1"
    with pytest.raises(UserError, match=said):
        stage(resources=resources, training=training)
    for fits in ({"workers": 1, "gpus_per_worker": 0.5}, {"workers": 2, "gpus_per_worker": 1}, {"workers": 2}):
        assert stage(resources=fits, training=training).config.resources.workers == fits["workers"]


def test_precision_is_that_of_the_workers_processor_and_checkpoints_change_no_weights(monkeypatch):
    monkeypatch.setattr(engine_settings, "has_bfloat16", lambda gpu=False: gpu)
    for gpus in (0, 0.5):
        resolved = stage(resources={"gpus_per_worker": gpus}, training={}).config.training.bf16
        assert resolved is (gpus > 0)
    found = stage(training={"bf16": False, "checkpoint_every": 7}).resolved()
    assert found == json.loads(json.dumps(stage().resolved()))


def test_workers_that_may_be_left_must_be_able_to_share_a_step_and_to_cut_a_batch():
    check_workers(1, 4, 12)
    with pytest.raises(UserError, match=r"batches_per_step 4 can't be divided among 3 workers"):
        check_workers(1, 4, 4)
    with pytest.raises(UserError, match=r"fewest_workers is 2, more than resources.workers, 1"):
        check_workers(2, None, 4)
    with pytest.raises(UserError, match=r"64 rows \(b\) can't be cut into 3 .* as 3 workers, which may be left of 4"):
        check_slices(2, 4, 1, 64, "b", accepted=True)
    with pytest.raises(UserError, match=r"into 3 equal slices, as 6 workers \(resources\.workers\) would"):
        check_slices(None, 6, 2, 64, "b", accepted=True)
    whole = r"^2 workers \(resources\.workers\) would cut each batch into 2 slices .* trains on whole batches alone"
    with pytest.raises(UserError, match=whole):
        check_slices(None, 2, 1, None, "b", accepted=False)
    check_slices(1, 4, 4, None, "b", accepted=False)
    replug = {"objective": {"kind": "replug", "scores": "run/scores"}, "resources": {"workers": 2}, "validation": None}
    with pytest.raises(UserError, match=whole):
        stage(**replug).check_settings({})
    stage(resources={"workers": 2}, validation=None).check_settings({})
    for fewest, workers, per_step, rows in (
        (None, 4, 1, 64), (None, 4, 2, 6), (None, 2, 6, 7), (2, 4, 1, None), (None, None, 1, 7),
    ):  # fmt: skip
        check_slices(fewest, workers, per_step, rows, "b", accepted=True)


@pytest.mark.parametrize(("resources", "changes", "fit"), [
    ({}, {}, "alone"),
    ({"workers": 1, "gpus_per_worker": 1}, {}, "alone"),
    ({"workers": 2}, {"fewest_workers": 2}, "on workers"),
    ({}, {"sharding": "zero2"}, "on workers"),  # which a process group shares out
])  # fmt: skip
def test_a_run_is_one_task_or_ray_trains(monkeypatch, resources, changes, fit: str) -> None:
    happened = list[Any]()
    for name, place in (("alone", "worker.fit_alone"), ("on workers", "workers.fit_on_workers")):
        monkeypatch.setattr(f"trainers.jobs.{place}", lambda *those, name=name: happened.append(name) or those)
    monkeypatch.setattr("trainers.jobs.worker.outcome_of", lambda fit, *those: (fit(), those))
    monkeypatch.setattr("trainers.jobs.train.open_board", lambda: "board")
    monkeypatch.setattr(Train, "seconds_here", lambda *_: 7.0)
    monkeypatch.setattr(Train, "derivation", lambda _: "derived")
    made = stage(resources=resources, failures_survived=5, **changes)

    def makes_here(seconds: float, *, is_spread: bool) -> bool:
        happened.append((seconds, is_spread))
        return False

    session: Any = SimpleNamespace(start=lambda: happened.append("start"), makes_here=makes_here, is_alone=True)
    ((((arguments, spread), shown),)) = made.execute([Shard("run")], session, "progress")  # type: ignore[arg-type, list-item]
    sent = made.for_workers()
    assert shown == ("board", "progress")
    assert arguments == {"settings": sent.config, "derivation": "derived", "board": "board"}
    assert spread == (sent.config.resources, changes.get("fewest_workers"), 5, True)
    assert happened == [(7.0, bool(resources)), "start", fit]


def test_a_short_run_is_made_in_this_process_on_all_of_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, called = list[int](), list[Any]()
    record = ShardRecord("run", 5, ())
    monkeypatch.setattr("trainers.jobs.train.usable_cpus", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("trainers.training_run.recorded_training", lambda *those: called.append(those) or record)
    monkeypatch.setattr(Train, "seconds_here", lambda *_: 0.0)
    monkeypatch.setattr(Train, "derivation", lambda _: "derived")
    progress: Any = ProgressLine("model", 1, "examples", "")
    made = stage()
    assert list(made.execute([Shard("run")], RaySession(shards_here=True), progress)) == [record]
    ((config, derivation, device, (shown,)),) = called
    assert (config, derivation, device) == (made.for_workers().config, "derived", torch.device("cpu"))
    assert isinstance(shown, ShownProgress)
    assert threads == [7]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 24), st.integers(1, 8))
def test_what_is_accepted_can_be_cut_by_any_number_of_workers(per_step, workers, rows, fewest):
    """As the order cuts them."""
    fewest = min(fewest, workers)
    counts = [left for left in range(fewest, workers + 1) if can_share(per_step, left)]
    assume(len(counts) == workers + 1 - fewest)
    slices = [piece.parts for left in counts for piece in next(Order([per_step], per_step, 0, left).steps()).pieces]
    try:
        check_slices(fewest, workers, per_step, rows, "b", accepted=True)
    except UserError:
        assert any(rows % parts for parts in slices)
    else:
        assert not any(rows % parts for parts in slices)


@pytest.mark.parametrize(("steps", "first", "last"), [(1, 0.0, 0.0), (19, 0.0, 18.0), (20, 0.5, 18.5), (40, 1.5, 37.5)])
def test_mean_losses_are_of_tenths_of_the_steps(steps: int, first: float, last: float) -> None:
    trained: Any = SimpleNamespace(state=SimpleNamespace(steps=steps), stopped_early=False, criteria=[], best=None)
    found = _facts([{"loss": float(number)} for number in range(steps)], trained)
    assert (found["first_loss"], found["last_loss"]) == (first, last)


@pytest.mark.parametrize(("measure", "start", "value", "is_worse"), [
    ("RR@10", 0.73, 0.72, True),
    ("RR@10", 0.73, 0.74, False),
    ("RR@10", 0.73, 0.73, False),
    ("RR@10", None, 0.1, False),
    ("loss", 1.2, 1.3, True),
    ("loss", 1.2, 1.1, False),
])  # fmt: skip
def test_an_encoder_that_training_made_worse_is_told(
    tmp_path: Path, measure: str, start: float | None, value: float, is_worse: bool
) -> None:
    """By the measure of the best: the run ended before the one decided of which the other direction is better."""

    def criterion(measure: str, start: int) -> dict[str, Any]:
        return {"measure": measure, "higher_is_better": measure != "loss", "start": start}

    criteria = [criterion("RR@10" if measure == "loss" else "loss", 11), criterion(measure, 0)]
    facts = {"best": {"step": 4, "measure": measure, "value": value, "start": start}, "criteria": criteria}
    artifact = Artifact(make_artifact(tmp_path / "model", "model", {}, facts, {"x": "1"}, 1))
    lines = stage().announce(artifact)
    for stopped, end in ((True, "after 4 steps; patience ended the run)"), (False, "(best, after 4 steps)")):
        facts |= {"steps": 9, "first_loss": 2.0, "last_loss": 1.0, "stopped_early": stopped}
        told: Any = SimpleNamespace(manifest={"facts": facts})
        assert stage().summary(told).endswith(end)
    if is_worse:
        assert f"{measure} was {start:.4f} before training and is {value:.4f} at its best" in lines[-1]
        assert lines[-1].startswith(artifact.uri)
    else:
        assert lines == []
    unmeasured: Any = SimpleNamespace(manifest={"facts": {}})
    assert stage().announce(unmeasured) == []


def test_replugs_scores_are_of_no_other_batches():
    objective = {"kind": "replug", "scores": "run/scores"}
    with pytest.raises(UserError, match="validation of kind batches has no scores of the language model"):
        stage(objective=objective, validation={"kind": "batches", "batches": "run/held_out"})
    assert stage(objective=objective).config.objective.kind == "replug"


def test_two_encoders_that_cannot_be_one_are_refused_before_they_are_trained(tiny_encoder: Path):
    settings = {"model": str(tiny_encoder), "pooling": "mean"}
    run = stage(encoder=settings | {"query_prompt": "query: "}, document_encoder=settings).config
    message = "encoder and document_encoder differ in more than their weights: query_prompt 'query: ' against ''"
    with pytest.raises(UserError, match=message):
        load_for_training(run, run.located())
    alike = stage(encoder=settings, document_encoder=settings).config
    assert load_for_training(alike, alike.located()).document.contract.pooling == "mean"


class Exported:
    """What is exported of an objective: nothing but a contract."""

    def eval(self) -> None: ...

    def export(self, folder: Path) -> None: ...

    def encoder(self, role: str) -> SimpleNamespace:  # noqa: ARG002
        contract = EncoderContract(
            model="f" * 64, pooling="mean", normalize=True, query_prompt="", document_prompt="", max_length=8,
            dtype="float32", dimension=4,
        )  # fmt: skip
        return SimpleNamespace(contract=contract)


HELD_OUT = {"kind": "batches", "batches": "run/held_out"}


@pytest.mark.parametrize(("state", "said"), [
    (State(4), "4 steps, 32 examples"),
    (State(4, best_step=3), "3 steps, 24 examples: the weights after step 3 of 4, chosen by validation"),
])  # fmt: skip
def test_the_card_counts_what_the_exported_weights_have_seen(tmp_path: Path, monkeypatch, state: State, said: str):
    """Validation on batches, or on a sample, has nothing to tell in the card, but it chooses as any other."""
    monkeypatch.setattr(Train, "input_fingerprints", lambda _: {"batches": "b" * 64, "encoder.model": "e" * 64})
    folder = Folder(str(tmp_path / "model"))
    run_log = RunLog(folder, torch.device("cpu"))
    with run_log:
        for step in range(1, 5):
            run_log.on_step({"step": step, "loss": 1.0, "examples": 8})
    job = stage(output=folder.uri, validation=HELD_OUT if state.best_step else None)
    write_model(job.config, job.derivation(), Exported(), Trained(4, state), run_log)
    assert f"| training | {said} |" in folder.read_bytes("README.md").decode()


SEARCHED = SETTINGS["validation"]
MEASURED = (Evaluation(0, {"loss": 2.0, "nDCG@10": 0.1}), Evaluation(3, {"loss": 1.0, "nDCG@10": 0.4}))


@pytest.mark.parametrize(("validation", "evaluations", "is_told"), [
    (SEARCHED, MEASURED, True),
    (SEARCHED | {"queries": 5}, MEASURED, False),
    (HELD_OUT, MEASURED, False),
    (SEARCHED, (), False),
], ids=["whole", "sample", "batches", "none"])  # fmt: skip
def test_measures_are_kept_and_the_card_tells_those_of_a_whole_split_alone(
    tmp_path: Path, monkeypatch, validation: dict[str, Any], evaluations: tuple[Evaluation, ...], is_told: bool
) -> None:
    monkeypatch.setattr(Train, "input_fingerprints", lambda _: {"batches": "b" * 64, "encoder.model": "e" * 64})
    job, folder = stage(output=str(tmp_path), validation=validation), Folder(str(tmp_path))
    run_log = RunLog(folder, torch.device("cpu"))
    run_log.ledger = {"steps": 4}
    with run_log:
        run_log.on_step({"step": 1, "loss": 1.0, "examples": 8})
    best_step = 3 if evaluations else None
    trained = Trained(9, State(4, evaluations, best_step), job.config.validation.criteria([4]))
    record = write_model(job.config, job.derivation(), Exported(), trained, run_log)
    card = folder.read_bytes("README.md").decode()
    assert ("| nDCG@10 | 0.4000 | 0.1000 |" in card) == ("those after 3 steps" in card) == is_told
    assert folder.exists("evaluations.jsonl") == bool(evaluations)
    assert {"README.md", "training.jsonl"} <= {file.name for file in record.files}
    assert json.loads(folder.read_bytes("ledger.json")) == {"steps": 4}
    assert len(folder.read_bytes("log.jsonl").splitlines()) == 1 + len(evaluations)
    assert record.rows == 8
    assert record.facts["stopped_early"] is True
    assert "model" not in record.facts["encoder"]
    measure, start, value = ("loss", 2.0, 1.0) if validation is HELD_OUT else ("nDCG@10", 0.1, 0.4)
    best = {"step": 3, "measure": measure, "value": value, "start": start}
    assert record.facts.get("best") == (best if evaluations else None)
