"""Workers that hold parts of a large domain's points between the passes of k-means."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import copy_context
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import ray
import ray.exceptions
import torch

from pipelines.clustering.points import Points, Split, keep_what_fits
from raytriever.errors import UserError
from raytriever.stages.placement import workers_that_fit
from raytriever.stages.stage import Resources

_CALLS_AHEAD = 2  # of one worker, so that it doesn't wait for the driver
_RESTARTS = 16

Domain = TypeVar("Domain")
Made = TypeVar("Made")


class PartWorkers:
    """Actors that hold parts of large domains' points between the passes of k-means; a context manager.

    A worker that dies is restarted, and its task is repeated. It makes its points again from the stored vectors.
    Functions of parts are pure, so results are the same.

    ``workers_of_a_domain``: workers for each of the domains that are clustered at a time, from one to ``most_at_once``
    domains. All workers serve all of these domains. While one domain waits for its largest part, they work on others.
    """

    def __init__(self, resources: Resources, workers_of_a_domain: int, most_at_once: int) -> None:
        self._resources = resources
        self._workers_of_a_domain, self._most_at_once = workers_of_a_domain, most_at_once
        self._actors: list[Any] = []
        self._splits = count()

    def __enter__(self) -> "PartWorkers":
        cpus, gpus = self._resources.cpus, self._resources.gpus_per_worker
        fitting = max(1, workers_that_fit(cpus, gpus))
        actor = ray.remote(_PartWorker).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=_RESTARTS, max_task_retries=_RESTARTS
        )
        self._actors = [actor.remote() for _ in range(min(self._resources.workers or fitting, fitting))]
        self._at_once = max(1, min(self._most_at_once, len(self._actors) // self._workers_of_a_domain))
        self._threads = ThreadPoolExecutor(self._at_once)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors:
            ray.kill(actor)  # after an error, so that threads of other domains fail
        self._threads.shutdown()

    def map_domains(self, make: Callable[[Domain, Split], Made], domains: Sequence[Domain]) -> Iterator[Made]:
        """``make`` of each domain, begun in this order, as they are finished. Raises what the first to fail raises."""
        futures: list[Future[Made]] = [
            self._threads.submit(copy_context().run, make, domain, self.split) for domain in domains
        ]
        for future in as_completed(futures):
            yield future.result()

    def split(self, points: Sequence[Points]) -> "RayParts":
        """Shares out parts among the workers, which forget the points of those that this thread shared out before."""
        for worker in range(len(self._actors)):
            keep_what_fits(points[worker :: len(self._actors)], share=self._at_once)
        return RayParts(points, self._actors, (get_ident(), next(self._splits)))


class RayParts:
    """Parts on workers: part i on worker i modulo their number. ``key``: of the thread and the split."""

    def __init__(self, points: Sequence[Points], actors: Sequence[Any], key: tuple[int, int]) -> None:
        self.points = points
        self._actors, self._key = actors, key
        self._described = [ray.put(part) for part in points]

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Results as they finish. A few calls of each worker run at a time."""
        shared = [ray.put(argument) for argument in arguments]
        count = len(self._actors)
        waiting = [list(range(number, len(self.points), count))[::-1] for number in range(count)]
        under_way: dict[Any, int] = {}

        def call(worker: int) -> None:
            if waiting[worker]:
                number = waiting[worker].pop()
                own = [] if each is None else [each[number]]
                answer = self._actors[worker].run.remote(
                    self._key, number, self._described[number], function, *shared, *own
                )
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
        self._held: dict[int, tuple[int, dict[int, Points]]] = {}

    def run(
        self, key: tuple[int, int], number: int, points: Points, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """``function`` of one part; ``points`` describes it and is used where this worker does not hold it."""
        thread, split = key
        known, held = self._held.get(thread, (split, {}))
        if known != split:
            held = {}
        self._held[thread] = split, held
        return function(held.setdefault(number, points), *arguments)
