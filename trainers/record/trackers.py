"""Trackers: where a run can be watched besides its own JSONL, each by its name and only if its package is installed.

A tracker works in a thread of its own behind a bounded queue. A failure there (a lost server, a full disk, no login)
costs one line and the tracker, never a step. A slow tracker makes no rank wait.
"""

import hashlib
import importlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import Field, PositiveInt

from raytriever.artifacts.artifact import Derivation, to_json
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import Settings
from trainers.engine.callback import Callback
from trainers.engine.early_stopping import Evaluation

TrackerName = Literal["tensorboard", "wandb"]

_PACKAGES: dict[TrackerName, str] = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_DIGITS = 16  # of a training's digest, in the name of a file
_DIGITS_OF_FOLDER = 8  # which people read
_WAITING_POINTS = 10_000  # at most, in memory
_CLOSING_SECONDS = 60.0
_UNTRACKED = ("step", "examples", "tokens", "seconds", "waiting_seconds", "peak_seconds")  # but as rates


class TrackingSettings(Settings):
    """Where a run can be watched. Logins, servers and entities are those of the environment, as each package says."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers to use."""
    project: str = Field(default="raytriever", min_length=1)
    """Project of Weights & Biases."""
    run_name: str | None = None
    """Name of the run. null: the tracker makes one up."""
    folder: str | None = None
    """Folder for TensorBoard's events and local files. null: beside the model."""
    every: PositiveInt = 1
    """Steps between tracked steps."""

    def _check(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers names one twice: {', '.join(self.trackers)}")


class TrackedTraining(NamedTuple):
    """What trackers know of a training. ``digest``: equal where one is resumed, of all that tells it from another.

    ``folder``: local, for events, offline runs and the ids of runs; several trainings may share it. ``config``: the
    settings, as JSON values.
    """

    digest: str
    folder: Path
    config: Mapping[str, Any]

    def run_file(self, tracker: TrackerName) -> Path:
        """Holds the id of the tracker's run. Another attempt of this training resumes it."""
        return self.folder / f"{tracker}-{self.digest[:_DIGITS]}.run"


def tracked_training(tracking: TrackingSettings, output: str, derivation: Derivation) -> TrackedTraining:
    """The trackers' identity of the training that makes ``output`` as ``derivation`` says.

    It changes if the model is made again from something else, or goes elsewhere, as in a sweep. Then no checkpoint is
    resumed either. Raises ``UserError`` where there is no local folder for the trackers.
    """
    if tracking.folder is None and tracking.trackers and "://" in output:
        raise UserError(
            f"The model goes to {output}, but trackers write to a local folder. Set tracking.folder to one. With"
            " several machines it is on the first worker's."
        )
    digest = hashlib.sha256(to_json([output, asdict(derivation)])).hexdigest()
    return TrackedTraining(digest, Path(tracking.folder or f"{output}-tracking"), derivation.config)


class Tracker(Protocol):
    """Gets numbers by name at steps, which do not decrease; at the end, whether the training failed."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    """Events in ``<folder>/tensorboard/<run name>-<digest>``, a folder for each training.

    A resumed training purges an earlier attempt's events of the repeated steps. So its events begin with the first step
    that it logs.
    """

    def __init__(self, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        name = "-".join(filter(None, (settings.run_name, training.digest[:_DIGITS_OF_FOLDER])))
        self._open = partial(module.SummaryWriter, str(training.folder / "tensorboard" / name))
        self._settings = f"```json\n{json.dumps(training.config, indent=1, sort_keys=True)}\n```"
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(purge_step=step)
            self._writer.add_text("settings", self._settings, step)
        for name, value in values.items():
            self._writer.add_scalar(name.replace("@", "_at_"), value, step)  # it has no place for an @

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """A run of a project; where it goes (online, offline) the environment says, as the package documents."""

    def __init__(self, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        file = training.run_file("wandb")
        self._run = module.init(
            project=settings.project,
            name=settings.run_name,
            config=dict(training.config),
            dir=str(training.folder),
            id=file.read_text() if file.exists() else None,
            resume="allow" if file.exists() else None,
            # numbers and settings only: neither the code nor what is printed, nor the machine and its packages
            save_code=False,
            settings=module.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        file.write_text(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


_TRACKERS: dict[TrackerName, Callable[[Any, TrackedTraining, TrackingSettings], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}


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
            tracker.put((step, values))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits, for a while, until everything has arrived, and says whether an error ended the training."""
        for tracker in self._trackers:
            tracker.failed = kind is not None
            tracker.put(None)
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
        **({"speed/mfu": point["peak_seconds"] / seconds} if "peak_seconds" in point else {}),
    }


def open_trackers(settings: TrackingSettings, training: TrackedTraining) -> Trackers:
    """The trackers that ``settings`` names. A resumed training resumes its tracked run.

    They get the settings of ``training``, nothing else, and nothing of the environment. A tracker that is turned off is
    a line of the log. Raises ``UserError`` where a package is absent.
    """
    modules = require_packages(settings)
    opened = [_InBackground(name, module, training, settings) for name, module in modules.items()]
    return Trackers(opened, settings.every)


def require_packages(settings: TrackingSettings) -> dict[TrackerName, Any]:
    """The module of every tracker that ``settings`` names. Raises ``UserError`` where one is absent."""
    modules: dict[TrackerName, Any] = {}
    for name in settings.trackers:
        try:
            modules[name] = importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            raise UserError(
                f"tracking.trackers names {name}, but its package isn't installed where training runs. Install it"
                f" there (pip install {_PACKAGES[name]}), or take it out of the list. The curve is stored in any case."
            ) from error
    return modules


class _InBackground(threading.Thread):
    """A tracker in a thread of its own: what is put is logged there, None ends it. What goes wrong turns it off."""

    def __init__(self, name: TrackerName, module: Any, training: TrackedTraining, settings: TrackingSettings) -> None:
        super().__init__(name=name, daemon=True)
        self.failed = False
        self._folder = training.folder
        self._begin = partial(_TRACKERS[name], module, training, settings)
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_WAITING_POINTS)
        self._is_off = False
        self.start()

    def put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        """Numbers by name at a step, or None: nothing more will come. Never waits."""
        if not self._is_off:
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                self._turn_off(f"{_WAITING_POINTS:,} points wait to be sent (is its server in reach?)")

    def wait(self, deadline: float) -> None:
        """Until the tracker is closed or the monotonic clock shows ``deadline``."""
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            self._turn_off("it was left behind with points that it had not sent (is its server in reach?)")

    def run(self) -> None:
        """What the thread does."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tracker: Tracker = self._begin()
            while (item := self._queue.get()) is not None and not self._is_off:
                tracker.log(*item)
            tracker.close(failed=self.failed)
        except BaseException as error:  # SystemExit too: some trackers end the process when they give up
            self._turn_off(without_credentials(" ".join(f"{type(error).__name__}: {error}".split())))

    def _turn_off(self, problem: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.warning(f"{self.name} is off: {problem[:300]}. The training doesn't need it, and stores its curve.")


def without_credentials(text: str) -> str:
    """The text with user and password taken out of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1…@", text)
