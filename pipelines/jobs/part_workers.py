"""Workers that hold parts of a large domain's points between the passes of k-means."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import ray.exceptions
import torch

from pipelines.clustering.points import Points, keep_what_fits
from raytriever.errors import UserError
from raytriever.stages.placement import workers_that_fit
from raytriever.stages.stage import Resources

_CALLS_AHEAD = 2  # of one worker, so that it doesn't wait for the driver
_RESTARTS = 16


class PartWorkers:
    """Actors that hold parts of a large domain's points between the passes of k-means; a context manager.

    A worker that dies is started anew, and what it was asked is asked again: it makes its points once more from the
    stored vectors, and functions of parts are pure, so results are the same.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._actors: list[Any] = []
        self._splits = 0

    def __enter__(self) -> "PartWorkers":
        cpus, gpus = self._resources.cpus, self._resources.gpus_per_worker
        fitting = max(1, workers_that_fit(cpus, gpus))
        actor = ray.remote(_PartWorker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=_RESTARTS, max_task_retries=_RESTARTS
        )
        self._actors = [actor.remote() for _ in range(min(self._resources.workers or fitting, fitting))]
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def split(self, points: Sequence[Points]) -> "RayParts":
        """The parts shared out among the workers, which forget the points of those before."""
        self._splits += 1
        for number in range(len(self._actors)):
            keep_what_fits(points[number :: len(self._actors)])
        return RayParts(points, self._actors, self._splits)


class RayParts:
    """Parts on workers: part i on worker i modulo their number."""

    def __init__(self, points: Sequence[Points], actors: Sequence[Any], split: int) -> None:
        self.points = points
        self._actors, self._split = actors, split
        self._described = [ray.put(part) for part in points]

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """As they are finished; a few calls of each worker are under way at a time."""
        shared = [ray.put(argument) for argument in arguments]
        count = len(self._actors)
        waiting = [list(range(number, len(self.points), count))[::-1] for number in range(count)]
        under_way: dict[Any, int] = {}

        def call(worker: int) -> None:
            if waiting[worker]:
                number = waiting[worker].pop()
                own = [] if each is None else [each[number]]
                key = (self._split, number)
                answer = self._actors[worker].run.remote(key, self._described[number], function, *shared, *own)
                under_way[answer] = number

        for worker in range(count):
            for _ in range(_CALLS_AHEAD):
                call(worker)
        while under_way:
            (answer,), _ = ray.wait(list(under_way))
            number = under_way.pop(answer)
            call(number % count)
            try:
                result = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise
            yield number, result


class _PartWorker:
    """The points of its parts, made when first asked for."""

    def __init__(self) -> None:
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))
        self._points: dict[tuple[int, int], Points] = {}

    def run(self, key: tuple[int, int], points: Points, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function`` of one part; ``points`` describes it and is used where this worker does not hold it."""
        self._points = {known: held for known, held in self._points.items() if known[0] == key[0]}
        return function(self._points.setdefault(key, points), *arguments)
