"""Checkpoints: what they hold, which are kept, and what is made of those that are damaged or of another run."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raytriever.artifacts.storage import Folder
from raytriever.errors import StorageError, UserError
from tests.unit.trainers.tiny import TinyEncoder, assert_same, weights_of
from trainers.engine.checkpoint import Checkpoints, State
from trainers.engine.early_stopping import Evaluation
from trainers.engine.optimization import build_optimizer
from trainers.engine.settings import OptimizerSettings

TRAINING = {"seed": 1, "optimizer": {"learning_rate": 0.1}}


def stepped(kind: str = "adamw", steps: int = 3):
    """An encoder with a frozen table and an unused layer, and its optimizer after some steps."""
    torch.manual_seed(0)
    encoder = TinyEncoder()
    encoder.embedding.requires_grad_(False)
    encoder.unused = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(encoder, OptimizerSettings(kind=kind, learning_rate=0.1, weight_decay=0.01))
    for _ in range(steps):
        step(encoder, optimizer)
    return encoder, optimizer


def step(encoder, optimizer):
    optimizer.zero_grad()
    encoder(encoder.tokenize(["w1 w2 w3", "w4"], "query")).square().sum().backward()
    optimizer.step()


def run(folder: Path, keep: int = 2, **config) -> Checkpoints:
    checkpoints = Checkpoints(str(folder), config, keep=keep)
    return checkpoints.of_run(TRAINING, "b" * 64)


def save(checkpoints: Checkpoints, steps: int, encoder, optimizer, best_step: int | None = None) -> None:
    checkpoints.save(State(steps, best_step=best_step), encoder, optimizer)
    checkpoints.wait()


@pytest.mark.parametrize("kind", ["adamw", "adam", "radam"])
def test_a_restored_optimizer_goes_on_exactly(tmp_path, kind):
    encoder, optimizer = stepped(kind)
    save(run(tmp_path), 3, encoder, optimizer)
    step(encoder, optimizer)

    other, its_optimizer = stepped(kind, steps=0)
    assert run(tmp_path).restore(other, its_optimizer).steps == 3
    step(other, its_optimizer)
    assert_same(weights_of(other), weights_of(encoder))


def test_the_trainable_weights_are_stored_beside_a_record_in_plain_json(tmp_path):
    encoder, optimizer = stepped()
    save(run(tmp_path, encoder={"model": "x"}), 3, encoder, optimizer)
    folder = tmp_path / "step-00000003"
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert set(load_file(folder / "weights.safetensors")) == trained
    names = {path.name for path in folder.iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "checkpoint.json"}
    text = (folder / "checkpoint.json").read_text()
    record = json.loads(text)
    assert text.startswith('{\n "steps": 3,\n')
    assert record["derivation"]["config"] == {"encoder": {"model": "x"}, "training": TRAINING}


def folders(path: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in path.iterdir())


def test_the_last_ones_are_kept_and_the_best_one_besides(tmp_path):
    encoder, optimizer = stepped()
    (tmp_path / "last" / ".tmp-killed").mkdir(parents=True)
    for steps in (1, 2, 3, 10):
        save(run(tmp_path / "last", keep=2), steps, encoder, optimizer)
    assert folders(tmp_path / "last") == [3, 10]
    kept, best = weights_of(encoder), tmp_path / "best"
    for steps in (2, 4, 6, 8):
        save(run(best, keep=1), steps, encoder, optimizer, best_step=2)
        step(encoder, optimizer)
    assert folders(best) == [2, 8]
    run(best).restore_weights(2, encoder)
    assert_same(weights_of(encoder), kept)
    save(run(best, keep=1), 10, encoder, optimizer, best_step=10)
    assert folders(best) == [10]
    with pytest.raises(UserError, match="step-00000002, the best of the run, is incomplete"):
        run(best).restore_weights(2, encoder)


def test_evaluations_come_back_and_without_a_checkpoint_it_is_step_zero(tmp_path):
    assert run(tmp_path / "absent").restore(*stepped()) == State(0)
    measured = {"nDCG@10": 0.25, "RR@10": 0.125, "AP": 0.5}
    evaluations = (Evaluation(0, measured, 1.5), Evaluation(3, dict.fromkeys(measured, 0.5), 2.5))
    with run(tmp_path) as checkpoints:
        checkpoints.save(State(3, evaluations, 3), *stepped())
    restored = run(tmp_path).restore(*stepped())
    assert restored == State(3, evaluations, 3)
    assert [list(evaluation.measures) for evaluation in restored.evaluations] == [list(measured)] * 2  # their order too


def test_what_is_written_in_the_background_is_the_state_of_the_call(tmp_path, monkeypatch):
    encoder, optimizer = stepped()
    expected = weights_of(encoder)
    go = threading.Event()
    write = Checkpoints._write
    monkeypatch.setattr(Checkpoints, "_write", lambda *arguments: go.wait(10) and write(*arguments))
    checkpoints = run(tmp_path)
    checkpoints.save(State(3), encoder, optimizer)
    step(encoder, optimizer)
    assert list(tmp_path.iterdir()) == []
    go.set()
    checkpoints.restore_weights(3, encoder)  # which waits for it
    assert_same(weights_of(encoder), expected)
    stored = load_file(tmp_path / "step-00000003" / "weights.safetensors")
    assert_same(stored, {name: expected[name] for name in stored})


def test_what_goes_wrong_in_the_background_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "put", lambda *_: (_ for _ in ()).throw(UserError("No space left")))
    checkpoints = run(tmp_path)
    checkpoints.save(State(3), *stepped())
    with pytest.raises(UserError, match="No space left"):
        checkpoints.save(State(6), *stepped())


def truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "no record, as after a kill": (lambda folder: (folder / "checkpoint.json").unlink(), "is incomplete"),
    "half a record": (lambda folder: (folder / "checkpoint.json").write_text('{"steps": 6'), "is damaged"),
    "a list": (lambda folder: (folder / "checkpoint.json").write_text("[]"), "is damaged"),
    "null": (lambda folder: (folder / "checkpoint.json").write_text("null"), "is damaged"),
    "no weights": (lambda folder: (folder / "weights.safetensors").unlink(), "is damaged"),
    "truncated": (truncate, "is damaged .optimizer.safetensors has another SHA-256"),
    "one bit": (flip, "is damaged .weights.safetensors has another SHA-256"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_line_and_keeps_no_new_one_from_staying(tmp_path, damage, logged):
    encoder, optimizer = stepped()
    save(run(tmp_path, keep=1), 2, encoder, optimizer, best_step=2)
    kept = weights_of(encoder)
    step(encoder, optimizer)
    save(run(tmp_path, keep=1), 12, encoder, optimizer, best_step=2)
    DAMAGE[damage][0](tmp_path / "step-00000012")
    resumed = run(tmp_path, keep=1)
    assert resumed.restore(encoder, optimizer).steps == 2
    assert len(logged) == 2
    assert "step-00000012" in logged[0]
    assert re.search(DAMAGE[damage][1], logged[0])
    assert logged[1].strip() == "resumes from the checkpoint after 2 steps"
    assert_same(weights_of(encoder), kept)
    assert folders(tmp_path) == [2, 12]  # other ranks may still look at it
    for steps in (4, 6):
        save(resumed, steps, encoder, optimizer, best_step=2)
        assert folders(tmp_path) == [2, steps]
    logged.clear()
    assert run(tmp_path).restore(encoder, optimizer).steps == 6
    assert [line.strip() for line in logged] == ["resumes from the checkpoint after 6 steps"]


@pytest.mark.parametrize(("saved", "left"), [([8], [3, 8]), ([6], [3, 6]), ([6, 9], [6, 9])], ids=str)
def test_a_damaged_one_is_kept_in_no_good_ones_place_unless_it_is_written_again(tmp_path, saved, left):
    encoder, optimizer = stepped()
    for steps in (3, 6):
        save(run(tmp_path), steps, encoder, optimizer)
    flip(tmp_path / "step-00000006")
    resumed = run(tmp_path)
    assert resumed.restore(encoder, optimizer).steps == 3
    for steps in saved:
        save(resumed, steps, encoder, optimizer)
    assert folders(tmp_path) == left
    assert run(tmp_path).restore(encoder, optimizer).steps == left[-1]


def test_a_checkpoint_behind_a_store_that_fails_is_not_taken_for_damaged(tmp_path, monkeypatch):
    encoder, optimizer = stepped()
    save(run(tmp_path), 3, encoder, optimizer)
    save(run(tmp_path), 6, encoder, optimizer)
    failing = StorageError("s3://bucket: SLOW_DOWN")
    monkeypatch.setattr(Folder, "local_path", lambda *_: (_ for _ in ()).throw(failing))
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        run(tmp_path).restore(encoder, optimizer)


def test_a_hostile_record_in_a_store_makes_no_file_outside_of_the_cache(object_store, tmp_path, monkeypatch, logged):
    monkeypatch.setenv("RAYTRIEVER_CACHE", str(tmp_path / "cache"))
    checkpoints = Checkpoints(f"{object_store}/hostile", {}).of_run(TRAINING, "b" * 64)
    encoder, optimizer = stepped()
    save(checkpoints, 3, encoder, optimizer)
    name = "step-00000003/checkpoint.json"
    record = json.loads(checkpoints.folder.read_bytes(name))
    record["files"] = dict.fromkeys(record["files"], "../../.bashrc")
    checkpoints.folder.write_bytes(name, json.dumps(record).encode())
    (tmp_path / "cache" / "files").mkdir(parents=True)
    (tmp_path / ".bashrc").write_text("mine")
    assert checkpoints.restore(encoder, optimizer).steps == 0
    assert "'../../.bashrc'. A SHA-256 is 64 of 0-9 and a-f" in logged[0]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / ".bashrc"]
    assert (tmp_path / ".bashrc").read_text() == "mine"


@pytest.mark.parametrize(("config", "arguments", "named"), [
    ({}, (TRAINING | {"seed": 2}, "b" * 64), "config.training.seed: 1 there, 2 now"),
    ({}, (TRAINING | {"optimizer": {"learning_rate": 0.2}}, "b" * 64), "optimizer.learning_rate: 0.1 there"),
    ({}, (TRAINING, "c" * 64), "inputs.batches: bbbbbbbbbbbb there, cccccccccccc now"),
    ({"encoder": "other"}, (TRAINING, "b" * 64), 'config.encoder: "(absent)" there, "other" now'),
])  # fmt: skip
def test_a_different_run_is_refused_by_the_names_of_its_fields(tmp_path, config, arguments, named):
    encoder, optimizer = stepped()
    save(run(tmp_path), 3, encoder, optimizer)
    with pytest.raises(UserError) as refusal:
        Checkpoints(str(tmp_path), config).of_run(*arguments).restore(encoder, optimizer)
    assert named in str(refusal.value)


def test_other_weights_are_refused(tmp_path):
    save(run(tmp_path), 3, *stepped())
    encoder = TinyEncoder(dimension=5)
    with pytest.raises(UserError, match=r"fit the model: 5 trainable .* the first embedding.weight \(None there"):
        run(tmp_path).restore(encoder, build_optimizer(encoder, OptimizerSettings()))


def test_an_object_store_holds_checkpoints_too(tmp_path, object_store, monkeypatch):
    monkeypatch.setenv("RAYTRIEVER_CACHE", str(tmp_path))
    checkpoints = Checkpoints(f"{object_store}/kept", {}, keep=1).of_run(TRAINING, "b" * 64)
    encoder, optimizer = stepped()
    for steps in (3, 6):
        save(checkpoints, steps, encoder, optimizer)
    other, its_optimizer = stepped(steps=0)
    assert checkpoints.restore(other, its_optimizer).steps == 6
    assert {name.split("/")[0] for name in checkpoints.folder.files()} == {"step-00000006"}
    assert_same(weights_of(other), weights_of(encoder))
