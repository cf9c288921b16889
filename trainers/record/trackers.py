"""Trackers: where a run can be watched besides its own JSONL, each by its name and only if its package is there.

A tracker works in a thread of its own behind a bounded queue. Whatever goes wrong there (a server that is gone, a full
disk) costs one line and the tracker, never a step: a slow one makes no rank wait, and a broken one is turned off.
"""

import hashlib
import importlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from raytriever.artifacts.artifact import Derivation, to_json
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import Settings
from trainers.engine.early_stopping import Evaluation
from trainers.engine.loop import Callback

TrackerName = Literal["tensorboard", "wandb", "mlflow"]

# the first that is there is used; the first is also what to install
_MODULES: dict[TrackerName, tuple[str, ...]] = {
    "tensorboard": ("tensorboardX", "torch.utils.tensorboard"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
_PARAMETERS = 100  # a request to MLflow
_DIGITS = 16  # of a training's digest, in the name of a file
_DIGITS_OF_FOLDER = 8  # which people read
_WAITING_POINTS = 10_000  # at most, in memory; beyond it points are dropped, and counted
_CLOSING_SECONDS = 60.0
_UNTRACKED = ("step", "examples", "tokens", "seconds", "waiting_seconds")  # but as rates


class TrackingSettings(Settings):
    """Where a run can be watched. Keys and logins come from the environment or the tracker's own login."""

    trackers: tuple[TrackerName, ...] = ()
    """Which ones."""
    project: str = Field(default="raytriever", min_length=1)
    """The project of Weights & Biases, the experiment of MLflow."""
    run_name: str | None = None
    """None: one that the tracker makes up."""
    entity: str | None = None
    """Whose project it is, Weights & Biases only."""
    uri: str | None = None
    """The MLflow server; None: MLFLOW_TRACKING_URI, else a file in ``folder``."""
    folder: str | None = None
    """For TensorBoard's events and local files; None: beside the model."""
    every: int = Field(default=1, ge=1)
    """Steps from one that is tracked to the next."""

    @model_validator(mode="after")
    def _fits_the_trackers(self) -> Self:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers names one twice: {', '.join(self.trackers)}")
        for key, tracker in (("entity", "wandb"), ("uri", "mlflow")):
            if getattr(self, key) is not None and tracker not in self.trackers:
                raise ValueError(f"{key} is for {tracker}, which trackers doesn't name")
        if self.uri is not None and "@" in self.uri.partition("://")[2]:  # and it isn't shown
            raise ValueError(
                "uri holds a login (…://…@…), but settings are stored and shown. Give it in the environment where"
                " training runs: MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self


@dataclass(frozen=True)
class TrackedTraining:
    """What trackers know of a training. ``digest``: equal where one is resumed, of all that tells it from another.

    ``folder``: local, for events, offline runs and the ids of runs; several trainings may share it. ``config``: the
    settings, as JSON values.
    """

    digest: str
    folder: Path
    config: Mapping[str, Any]

    def tracked_run(self, tracker: str) -> str | None:
        """The id of the run that an earlier attempt of this training began."""
        try:
            stored = json.loads(self._memory(tracker).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # or cut off in the middle of its only line
            return None
        return str(stored["id"]) if stored["training"] == self.digest else None

    def remember_run(self, tracker: str, run: str) -> None:
        """For attempts to come."""
        stored = {"id": run, "training": self.digest}
        self._memory(tracker).write_text(f"{json.dumps(stored)}\n", encoding="utf-8")

    def _memory(self, tracker: str) -> Path:
        return self.folder / f"{tracker}-{self.digest[:_DIGITS]}.run"


def tracked_training(tracking: TrackingSettings, output: str, derivation: Derivation) -> TrackedTraining:
    """What trackers know the training by that makes ``output`` as ``derivation`` says.

    It is another one where the model is made anew of something else, and where it goes elsewhere, in a sweep say:
    then no checkpoint is gone on from either. Raises ``UserError`` where there is no local folder for the trackers.
    """
    if tracking.folder is None and tracking.trackers and "://" in output:
        raise UserError(
            f"The model goes to {output}, but trackers write to a local folder. Name one as tracking.folder; with"
            " several machines it is the first worker's."
        )
    digest = hashlib.sha256(to_json([output, asdict(derivation)])).hexdigest()
    return TrackedTraining(digest, Path(tracking.folder or f"{output}-tracking"), derivation.config)


class Tracker(Protocol):
    """Gets numbers by name at steps, which do not decrease; at the end, whether the training failed."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    """Events in ``<folder>/tensorboard/<run name>-<digest>``, a folder for each training.

    A training that goes on purges what an earlier attempt wrote of the steps that are taken again, so its events begin
    with the first that it logs.
    """

    def __init__(self, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        name = "-".join(filter(None, (settings.run_name, training.digest[:_DIGITS_OF_FOLDER])))
        self._module, self._folder = module, str(training.folder / "tensorboard" / name)
        self._settings = f"```json\n{json.dumps(training.config, indent=1, sort_keys=True)}\n```"
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder, purge_step=step)
            self._writer.add_text("settings", self._settings, step)
        for name, value in values.items():
            self._writer.add_scalar(_plain_name(name), value, step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """A run of a project; where it goes (online, offline) the environment says, as the package documents."""

    def __init__(self, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        earlier = training.tracked_run("wandb")
        self._run = module.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.run_name,
            config=dict(training.config),
            dir=str(training.folder),
            id=earlier,
            resume="allow" if earlier else None,
            # numbers and settings only: neither the code nor what is printed nor the machine
            save_code=False,
            settings=module.Settings(
                console="off", silent=True, disable_git=True, disable_job_creation=True, x_disable_meta=True
            ),
        )
        training.remember_run("wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class _Mlflow:
    """A run of an experiment on a server, or in ``<folder>/mlflow.db``."""

    def __init__(self, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        here = f"sqlite:///{(training.folder / 'mlflow.db').absolute()}"
        self._entities = module.entities
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or here
        self._client = module.MlflowClient(tracking_uri=uri)
        earlier = training.tracked_run("mlflow")
        if earlier is not None:
            self._client.update_run(earlier, status="RUNNING")
        self._run = earlier or self._create(training, settings)

    def _create(self, training: TrackedTraining, settings: TrackingSettings) -> str:
        found = self._client.get_experiment_by_name(settings.project)
        number = found.experiment_id if found else self._client.create_experiment(settings.project)
        run: str = self._client.create_run(number, run_name=settings.run_name).info.run_id
        flat = [self._entities.Param(key, str(value)) for key, value in _flattened(training.config).items()]
        for start in range(0, len(flat), _PARAMETERS):
            self._client.log_batch(run, params=flat[start : start + _PARAMETERS])
        training.remember_run("mlflow", run)
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_plain_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


_TRACKERS: dict[TrackerName, tuple[str, Callable[[Any, TrackedTraining, TrackingSettings], Tracker]]] = {
    "tensorboard": ("TensorBoard", _TensorBoard),
    "wandb": ("Weights & Biases", _WeightsAndBiases),
    "mlflow": ("MLflow", _Mlflow),
}


def _plain_name(name: str) -> str:
    """``dev/nDCG@10`` as ``dev/nDCG_at_10``: TensorBoard and MLflow have no place for an ``@``."""
    return name.replace("@", "_at_")


def _flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class Trackers(Callback):
    """All trackers of a run; one process opens them, the first rank's."""

    def __init__(self, trackers: Sequence["_InBackground"], every: int = 1) -> None:
        self._trackers = trackers
        self._every = every

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Under the names that trackers group by, where the step is one to be tracked."""
        if self._trackers and point["step"] % self._every == 0:
            self.log(point["step"], tracked_values(point))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """``dev/nDCG@10`` and the like."""
        self.log(evaluation.step, {f"dev/{name}": value for name, value in evaluation.measures.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits, for a while, until everything has arrived, and says whether an error ended the training."""
        for tracker in self._trackers:
            tracker.end(failed=kind is not None)
        deadline = time.monotonic() + _CLOSING_SECONDS
        for tracker in self._trackers:
            tracker.wait(deadline)


def tracked_values(point: Mapping[str, Any]) -> dict[str, float]:
    """What is tracked of a step: a curve's point under the names that trackers group by."""
    seconds = max(float(point["seconds"]), 1e-9)
    return {
        **{f"train/{name}": float(value) for name, value in point.items() if name not in _UNTRACKED},
        "speed/examples_per_second": point["examples"] / seconds,
        "speed/tokens_per_second": point["tokens"] / seconds,
        "speed/waiting_share": point["waiting_seconds"] / seconds,
    }


def open_trackers(settings: TrackingSettings, training: TrackedTraining) -> Trackers:
    """The trackers that ``settings`` names; a resumed training goes on in the run in which it was tracked.

    They get the settings of ``training``; nothing else, and nothing of the environment. A tracker that is turned off
    is a line of the log. Raises ``UserError`` where a package or a login is absent.
    """
    modules = require_packages(settings)
    if "wandb" in modules:
        _require_login(modules["wandb"])
    opened = []
    for name, module in modules.items():
        title, kind = _TRACKERS[name]
        opened.append(_InBackground(title, partial(kind, module, training, settings), training.folder))
    return Trackers(opened, settings.every)


def require_packages(settings: TrackingSettings) -> dict[TrackerName, Any]:
    """The module of every tracker that ``settings`` names. Raises ``UserError`` where one is absent."""
    return {name: _require(name) for name in settings.trackers}


def _require(name: TrackerName) -> Any:
    for module in _MODULES[name]:
        with suppress(ImportError):
            return importlib.import_module(module)
    raise UserError(
        f"tracking.trackers names {name}, whose package isn't installed where training runs. Install it there (pip"
        f" install {_MODULES[name][0]}), or take it out of the list: the curve is stored in any case."
    )


def _require_login(wandb: Any) -> None:
    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        is_known = wandb.login(prompt=False)
    except Exception:  # it asks the server, which may be out of reach: that is no reason not to train
        return
    if not is_known:
        raise UserError(
            "tracking.trackers names wandb, but there is no login where training runs. Log in there (wandb login), set"
            " WANDB_API_KEY, or set WANDB_MODE=offline and send the run later (wandb sync)."
        )


class _InBackground:
    """A tracker in a thread of its own. What it raises turns it off with one line."""

    def __init__(self, title: str, start: Callable[[], Tracker], folder: Path) -> None:
        self._title = title
        self._start = start
        self._folder = folder
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_WAITING_POINTS)
        self._ended = threading.Event()
        self._dropped = 0
        self._failed = self._off = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {title}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._off:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._dropped += 1

    def end(self, *, failed: bool) -> None:
        """Nothing more will come."""
        self._failed = failed
        self._ended.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def wait(self, deadline: float) -> None:
        """Until the tracker is closed or the monotonic clock shows ``deadline``; logs what is lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._off = True
            log.warning(f"{self._title} was left behind with points that it had not sent; is its server in reach?")
        elif self._dropped:
            log.warning(f"{self._title} was too slow: {self._dropped:,} points were not sent.")

    def _work(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tracker = self._start()
            while not self._off and (item := self._next()) is not None:
                tracker.log(*item)
            tracker.close(failed=self._failed)
        except BaseException as error:  # SystemExit too: some trackers end the process when they give up
            if not self._off:
                self._off = True
                problem = without_credentials(" ".join(f"{type(error).__name__}: {error}".split()))
                log.warning(f"{self._title} is off: {problem[:300]}. Training goes on, and its curve is stored.")

    def _next(self) -> tuple[int, dict[str, float]] | None:
        try:
            return self._queue.get(block=not self._ended.is_set())
        except queue.Empty:
            return None  # what ends a queue that was full when the end came


def without_credentials(text: str) -> str:
    """The text with user and password taken out of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1…@", text)
