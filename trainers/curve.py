"""The training curve: one point a step, kept in pieces beside the checkpoints so that no kill leaves a gap."""

import json
from collections.abc import Mapping
from typing import Any

from raytriever.retrieval.storage import Folder
from raytriever.trainers.loop import StepReport

_PIECES = "curve/"


class Curve:
    """Collects the points of steps, and stores them just before a checkpoint is written.

    So every step up to a checkpoint has its point, whatever kills the run.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._points: list[dict[str, Any]] = []

    def add(self, point: dict[str, Any]) -> None:
        """Notes one step, as ``point_of`` has it."""
        self._points.append(point)

    def store(self) -> None:
        """Stores what was noted since the last piece."""
        if self._points:
            name = f"{_PIECES}{self._points[-1]['step']:08d}.json"
            self._folder.write_bytes(name, json.dumps(self._points).encode())
            self._points = []


def point_of(report: StepReport) -> dict[str, Any]:
    """A step as a flat mapping: what is stored, tracked and plotted of it."""
    return {
        "step": report.step,
        "epoch": report.epoch,
        "learning_rate": report.learning_rate,
        "loss": report.measured.loss,
        "gradient_norm": report.measured.gradient_norm,
        "examples": report.measured.examples,
        "tokens": report.measured.tokens,
        **report.measured.metrics,
        "seconds": report.seconds,
        "waiting_seconds": report.waiting_seconds,
    }


def read_curve(folder: Folder) -> list[dict[str, Any]]:
    """Every step's point, in order; where a step was taken twice around a kill, the later one."""
    by_step: dict[int, dict[str, Any]] = {}
    for name in folder.files():
        if name.startswith(_PIECES):
            for point in json.loads(folder.read_bytes(name)):
                by_step[point["step"]] = point
    return [by_step[step] for step in sorted(by_step)]


def without_times(point: Mapping[str, Any]) -> dict[str, Any]:
    """What of a point is a function of the run's settings alone."""
    return {key: value for key, value in point.items() if not key.endswith("seconds")}
