"""Points in parts, and where functions of a part are run: here one after another, or on workers.

Every function is pure, so a part can be computed anywhere and, where a worker dies, once more.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from raytriever.pipelines.clustering.points import Points

PART_POINTS = 1 << 15
HELD_BYTES = 1 << 30  # of one process: points are made once and held as far as this goes, else made for every pass


class Parts(Protocol):
    """Parts of a whole; ``points`` describes each."""

    points: Sequence[Points]

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(number, function(points of the part, *arguments, its item of ``each``)) of every part, in any order."""


Split = Callable[[Sequence[Points]], Parts]


class LocalParts:
    """Parts in this process: as many at once as torch has threads, each on one of them."""

    def __init__(self, points: Sequence[Points]) -> None:
        self.points = points
        keep_what_fits(points)

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """In the order of the parts."""

        def run(number: int) -> Any:
            return function(self.points[number], *arguments, *(() if each is None else (each[number],)))

        numbers = range(len(self.points))
        threads = min(torch.get_num_threads(), len(numbers))
        if threads == 1:
            yield from ((number, run(number)) for number in numbers)
            return
        # threads that share no work need not wait for one another, as those within an operation do
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield from zip(numbers, pool.map(run, numbers), strict=True)
        finally:
            torch.set_num_threads(torch.get_num_threads())  # else threads begun from now on would take the 1 for theirs


def keep_what_fits(points: Sequence[Points]) -> None:
    """Lets the first parts of one process, as many as fit in memory, hold their points. Results are the same."""
    left = HELD_BYTES
    for part in points:
        left -= 4 * len(part) * part.width
        part.keep = left >= 0 and not part.spherical  # concatenations would be a copy twice as large as the vectors


def cut(points: Points) -> list[Points]:
    """Consecutive parts of ``PART_POINTS`` points."""
    return [points.subset(slice(begin, begin + PART_POINTS)) for begin in range(0, len(points), PART_POINTS)]
