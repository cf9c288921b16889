"""Trackers get what they should, keep what they must not tell, and never stop a run."""

import importlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raytriever.artifacts.artifact import Derivation
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from trainers.engine.early_stopping import Evaluation
from trainers.record import trackers
from trainers.record.trackers import (
    TrackedTraining,
    TrackingSettings,
    open_trackers,
    tracked_training,
    tracked_values,
    without_credentials,
)

POINT = {
    "step": 4, "epoch": 0, "learning_rate": 1e-5, "loss": 1.5, "gradient_norm": 2.0, "examples": 8, "tokens": 200,
    "accuracy": 0.25, "seconds": 0.5, "waiting_seconds": 0.1,
}  # fmt: skip
CONFIG = {"training": {"seed": 3, "optimizer": {"learning_rate": 2e-5}}, "objective": {"kind": "contrastive"}}


class Stub(ModuleType):
    """Stands for wandb and tensorboardX at once; ``calls`` has what reached it."""

    def __init__(self) -> None:
        super().__init__("stub")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails = ""  # what raises an error
        self.Settings = dict

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            if name == self.fails:
                raise OSError("connection to http://me:hidden@server refused")
            return self

        return call

    id = "run7"

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """In the place of every tracker's package."""
    made = Stub()
    for name in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


def track(
    name: str, folder: Path, digest: str = "a" * 64, *, error: BaseException | None = None, **settings: Any
) -> None:
    """Two steps and an evaluation, then the end of the run, or ``error``."""
    training = TrackedTraining(digest, folder, CONFIG)
    opened = open_trackers(TrackingSettings(trackers=(name,), **settings), training)
    with suppress(UserError, KeyboardInterrupt), opened:
        opened.on_evaluation(Evaluation(0, {"nDCG@10": 0.3}))
        opened.on_step(POINT)
        opened.on_step(POINT | {"step": 5})
        if error is not None:
            raise error


def test_a_step_is_told_with_its_rates() -> None:
    assert tracked_values(POINT) == {
        "train/epoch": 0.0,
        "train/learning_rate": 1e-5,
        "train/loss": 1.5,
        "train/gradient_norm": 2.0,
        "train/accuracy": 0.25,
        "speed/examples_per_second": 16.0,
        "speed/tokens_per_second": 400.0,
        "speed/waiting_share": 0.2,
    }
    assert tracked_values(POINT | {"peak_seconds": 0.2})["speed/mfu"] == 0.4


def test_tensorboard_for_real_purges_the_steps_that_are_taken_again(
    tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorBoard reads events of a version from 2 on: a start purges what has its step or a later one."""
    pytest.importorskip("tensorboardX")
    from tensorboardX import event_file_writer
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    track("tensorboard", tmp_path, run_name="first")
    (events,) = (tmp_path / "tensorboard" / "first-aaaaaaaa").iterdir()
    for name in (b"train/loss", b"speed/examples_per_second", b"dev/nDCG_at_10", b'"learning_rate": 2e-05'):
        assert name in events.read_bytes()

    def attempt(*steps: int, digest: str = "a" * 64) -> None:
        training = TrackedTraining(digest, tmp_path, CONFIG)
        opened = open_trackers(TrackingSettings(trackers=("tensorboard",)), training)
        for step in steps:
            opened.on_step(POINT | {"step": step})
        opened.__exit__(UserError, None, None)

    seconds = itertools.count(1e9)  # a file's name has the one in which it was begun, and they are read in that order
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))

    attempt(1, 2, 3, 4)  # the last checkpoint was written after step 2
    attempt(3, 4, 5)
    attempt(1, digest="b" * 64)
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert names == ["aaaaaaaa", "bbbbbbbb", "first-aaaaaaaa"]
    kept: list[int] = []
    for path in sorted((tmp_path / "tensorboard" / "aaaaaaaa").iterdir()):
        for event in map(Event.FromString, records(path.read_bytes())):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                kept = [step for step in kept if step < event.step]
            kept += [event.step for value in event.summary.value if value.tag == "train/loss"]
    assert kept == [1, 2, 3, 4, 5]
    assert logged == []


def records(data: bytes) -> Iterator[bytes]:
    """Of a TFRecord file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


@pytest.mark.parametrize("error", [None, UserError("the loss is nan"), KeyboardInterrupt()])
def test_a_training_that_failed_is_shown_as_failed(
    stub: Stub, tmp_path: Path, logged: list[str], error: BaseException | None
) -> None:
    track("wandb", tmp_path, error=error)
    assert stub.named("finish") == [((), {"exit_code": 1 if error else 0})]
    assert logged == []


def test_weights_and_biases_by_a_stub(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, tmp_path: Path, logged: list[str]
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "not-to-be-told")
    folder = tmp_path / "not" / "there"
    track("wandb", folder, project="retrieval", run_name="a", every=4)
    (_, given), *_ = stub.named("init")
    named = {"project": "retrieval", "name": "a", "config": CONFIG, "dir": str(folder)}
    assert given.items() >= named.items()
    assert given["save_code"] is False
    assert given["settings"]["disable_git"]
    assert given["settings"]["x_disable_meta"]
    assert given["settings"]["x_disable_stats"]
    assert given["settings"]["x_save_requirements"] is False
    sent = stub.named("log")
    assert [named["step"] for _, named in sent] == [0, 4]  # of the steps, every fourth
    assert sent[0][0] == ({"dev/nDCG@10": 0.3},)
    assert len(stub.named("finish")) == 1
    assert "not-to-be-told" not in str(stub.calls)
    assert (given["id"], given["resume"]) == (None, None)
    track("wandb", folder)
    (_, again) = stub.named("init")[1]
    assert (again["id"], again["resume"]) == ("run7", "allow")  # a run that goes on is one run there
    assert logged == []


def test_trainings_that_share_a_folder_have_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, tmp_path: Path, logged: list[str]
) -> None:
    given: list[str | None] = []
    names = iter(("first", "second", "third"))

    def begin(**named: Any) -> Any:
        given.append(named["id"])
        return SimpleNamespace(id=named["id"] or next(names), log=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setattr(stub, "init", begin, raising=False)
    # two trials, begun anew after a crash; then the first with another learning rate
    for digest in ("1" * 64, "2" * 64, "1" * 64, "2" * 64, "3" * 64):
        track("wandb", tmp_path, digest)
    assert given == [None, None, "first", "second", None]
    assert logged == []


def test_a_training_is_another_one_where_the_model_is_made_of_something_else(tmp_path: Path) -> None:
    tracking = TrackingSettings(trackers=("wandb",), folder=str(tmp_path))
    derivation = Derivation("model", "train", 2, {"training": {"learning_rate": 1e-5}}, {"batches": "b" * 64})
    training = tracked_training(tracking, "/runs/model", derivation)
    assert (training.folder, training.config) == (tmp_path, derivation.config)
    assert tracked_training(tracking, "/runs/model", replace(derivation)).digest == training.digest
    others = [
        ("/runs/other", derivation),
        ("/runs/model", replace(derivation, config={"training": {"learning_rate": 2e-5}})),
        ("/runs/model", replace(derivation, inputs={"batches": "c" * 64})),
        ("/runs/model", replace(derivation, algorithm_version=3)),
    ]
    digests = {tracked_training(tracking, output, other).digest for output, other in others}
    assert len(digests | {training.digest}) == 5


def test_a_model_that_goes_to_a_store_needs_a_local_folder_for_its_trackers(tmp_path: Path) -> None:
    derivation, output = Derivation("model", "train", 2, {}, {}), "s3://bucket/model"
    named = TrackingSettings(trackers=("wandb",))
    with pytest.raises(UserError, match=rf"goes to {output}, but trackers write to a local folder\. Set tracking"):
        tracked_training(named, output, derivation)
    tracked_training(TrackingSettings(), output, derivation)  # which nobody writes to
    elsewhere = named.model_copy(update={"folder": str(tmp_path)})
    assert tracked_training(elsewhere, output, derivation).folder == tmp_path
    assert tracked_training(named, "/runs/model", derivation).folder == Path("/runs/model-tracking")


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_what_goes_wrong_there_costs_one_line(stub: Stub, tmp_path: Path, logged: list[str], fails: str) -> None:
    """Without the credentials that addresses have."""
    stub.fails = fails
    track("wandb", tmp_path)
    assert logged == [
        "wandb is off: OSError: connection to http://…@server refused. The training doesn't need it, and stores its"
        " curve."
    ]
    told = without_credentials("at https://me:pass@host/a@b and s3://key@bucket")
    assert told == "at https://…@host/a@b and s3://…@bucket"


@pytest.mark.parametrize(
    ("points", "problem"),
    [(3, "it was left behind with points that it had not sent"), (1000, "5 points wait to be sent")],
)
def test_a_tracker_that_hangs_makes_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, tmp_path: Path, logged: list[str], points: int, problem: str
) -> None:
    released = threading.Event()
    monkeypatch.setattr(stub, "init", lambda **_: released.wait(20), raising=False)
    monkeypatch.setattr(trackers, "_CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "_WAITING_POINTS", 5)
    opened = open_trackers(TrackingSettings(trackers=("wandb",)), TrackedTraining("a", tmp_path, {}))
    started = time.perf_counter()
    for step in range(points):
        opened.log(step, {"train/loss": 1.0})
    opened.__exit__(None, None, None)
    assert time.perf_counter() - started < 5
    assert {each.daemon for each in threading.enumerate() if each.name == "wandb"} == {True}  # nor the interpreter
    assert logged == [
        f"wandb is off: {problem} (is its server in reach?). The training doesn't need it, and stores its curve."
    ]
    released.set()


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, package: str) -> None:
    def absent(module: str) -> ModuleType:
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=rf"names {name}.*pip install {package}\)"):
        track(name, tmp_path / "folder", [])
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("values", "message"), [
    ({"trackers": ["wanbd"]}, "trackers"),
    ({"trackers": ["wandb", "wandb"]}, "names one twice"),
    ({"every": 0}, "every"),
    ({"token": "secret"}, "'token' is not a setting"),
])  # fmt: skip
def test_settings_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(TrackingSettings, values, "tracking")
