"""What k-means clusters: a point for each pair, made from its vectors block by block.

Points are rounded to a grid. It is so fine that float32 keeps its precision, and so coarse that float64 sums of all
points hold every bit. Such sums don't depend on the order of additions, hence not on parts, workers or threads.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import inner_products, squared_distances
from pipelines.clustering.pair_vectors import PairVectors, Places

if TYPE_CHECKING:
    import torch

BLOCK_ROWS = 4096
_FLOAT64_BITS = 53


def midpoints(*, queries: NDArray[np.floating], documents: NDArray[np.floating]) -> NDArray[np.float32]:
    """(q + d)/2, float32 (n, dimension): what Eq. 3 clusters where a centroid is one vector for both sides."""
    points = queries.astype(np.float32)
    points += documents
    points *= 0.5
    return points


def concatenated(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float32]:
    """[first; second] at unit length, float32 (n, 2·dimension); a zero vector stays zero.

    [q; d] and the swapped [d; q] are the two vectors per pair of Morris & Rush 2024, section 4.1, after Eq. 3.
    """
    points = np.concatenate((first, second), axis=1, dtype=np.float32)
    lengths = np.sqrt(inner_products(points, points))
    points /= np.maximum(lengths, np.finfo(np.float64).tiny)[:, None]
    return points


@dataclass(frozen=True)
class Frame:
    """``centre`` float32 (width,): what points are measured from, if anything.

    They are rounded to multiples of ``grid``, a power of two, if any.

    Centring shrinks the error bounds of the coarse products; squared distances are the same.
    """

    centre: NDArray[np.float32] | None = None
    grid: float | None = None

    @staticmethod
    def around(centre: NDArray[np.float32] | None, largest: float, count: int) -> "Frame":
        """The finest grid for exact float64 sums of ``count`` points without a coordinate beyond ``largest``."""
        bits = _FLOAT64_BITS - 1 - int(np.ceil(np.log2(max(count, 1))))
        return Frame(centre, 2.0 ** (np.ceil(np.log2(largest if largest > 0 else 1.0)) - bits))

    def apply(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Centres and rounds ``points``, in place, and returns them."""
        if self.centre is not None:
            points -= self.centre
        if self.grid is not None:
            points *= np.float32(1 / self.grid)
            np.rint(points, out=points)
            points *= np.float32(self.grid)
        return points


class Points:
    """The points of some pairs. Pickled, they are a description; what is held in memory stays behind.

    ``keep``: hold the points once made. ``device``: of the coarse products.
    """

    spherical: ClassVar[bool]  # centroids have unit length and costs are 1 - cosine, not squared distances
    converged_cost: ClassVar[float]  # a point of no more cost sits on its centroid
    vectors: ClassVar[int]  # a point is as long as this many vectors

    def __init__(self, pairs: PairVectors, frame: Frame | None = None, device: str = "cpu") -> None:
        self.pairs, self.frame, self.device = pairs, frame or Frame(), device
        self.keep = False
        self._held: NDArray[np.float32] | None = None
        self._on_device: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None, "_on_device": None}

    @property
    def width(self) -> int:
        """Length of a point."""
        return self.vectors * self.pairs.dimension

    def _make(self, places: Places) -> NDArray[np.float32]:
        raise NotImplementedError

    def subset(self, places: Places) -> Self:
        """Some of the points, numbered anew."""
        return type(self)(self.pairs.subset(places), self.frame, self.device)

    def take(self, places: Places) -> NDArray[np.float32]:
        """The points at ``places``, float32 (n, width)."""
        if self.keep and self._held is None:
            held = np.empty((len(self), self.width), dtype=np.float32)
            for part in self.blocks():
                held[part] = self.frame.apply(self._make(part))
            self._held = held
        return self.frame.apply(self._make(places)) if self._held is None else self._held[places]

    def on_device(self, part: slice) -> "torch.Tensor | None":
        """``take`` on a GPU, where points that are held go once; else None."""
        if self.device == "cpu" or self._held is None:
            return None
        if self._on_device is None:
            import torch

            self._on_device = torch.from_numpy(self._held).to(self.device)
        return self._on_device[part]

    def blocks(self) -> Iterator[slice]:
        """Consecutive stretches of at most ``BLOCK_ROWS`` points."""
        for begin in range(0, len(self), BLOCK_ROWS):
            yield slice(begin, min(begin + BLOCK_ROWS, len(self)))

    def costs(self, points: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.float64]:
        """The cost, float64 (n,), of each of these points in the cluster with the centroid in its row."""
        return 1 - inner_products(points, centroids) if self.spherical else squared_distances(points, centroids)

    def squares(self) -> float:
        """The sum of squared lengths; of spherical points, their number."""
        if self.spherical:
            return float(len(self))
        total = 0.0
        for part in self.blocks():
            block = self.take(part)
            total += float(inner_products(block, block).sum())
        return total


class MidPoints(Points):
    """(q + d)/2 of each pair; clusters are means, costs squared Euclidean distances."""

    spherical = False
    converged_cost = 0.0
    vectors = 1

    def _make(self, places: Places) -> NDArray[np.float32]:
        queries, documents = self.pairs.take(places)
        return midpoints(queries=queries, documents=documents)


class ConcatenatedPairs(Points):
    """[q; d] of each pair at unit length; costs are 1 - cosine, centroids have unit length."""

    spherical = True
    converged_cost = 1e-6  # float32 unit vectors have lengths of 1 ± 1e-7
    vectors = 2

    def _make(self, places: Places) -> NDArray[np.float32]:
        return concatenated(*self.pairs.take(places))


PART_POINTS = 1 << 15
HELD_BYTES = 1 << 30  # of one process: points are made once and held as far as this goes, else made for every pass


class Parts(Protocol):
    """Parts of a whole, ``points`` describing each, and where functions of them are run: here, or on workers.

    The functions are pure, so a part can be computed anywhere and, where a worker dies, once more.
    """

    points: Sequence[Points]

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(number, function(points of the part, *arguments, its item of ``each``)) of every part, in any order."""
        ...


Split = Callable[[Sequence[Points]], Parts]


class LocalParts:
    """Parts in this process: as many at once as torch has threads, each on one of them."""

    def __init__(self, points: Sequence[Points]) -> None:
        self.points = points
        keep_what_fits(points)

    def map(
        self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Results in the order of the parts."""
        import torch

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


def keep_what_fits(points: Sequence[Points], share: int = 1) -> None:
    """Lets the first parts of one process, as many as fit in its memory, hold their points. Results are the same.

    ``share``: these parts may have one in so many of the bytes.
    """
    left = HELD_BYTES // share
    for part in points:
        left -= 4 * len(part) * part.width
        part.keep = left >= 0 and not part.spherical  # concatenations would be a copy twice as large as the vectors


def cut(points: Points) -> list[Points]:
    """Consecutive parts of ``PART_POINTS`` points."""
    return [points.subset(slice(begin, begin + PART_POINTS)) for begin in range(0, len(points), PART_POINTS)]
