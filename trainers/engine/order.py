"""Which stored batches each step consumes on each rank: a pure function of position, whatever the world size.

Step s of epoch e consumes batches perm(seed, e)[s G … s G + G) with G = ``batches_per_step``. ``group_by_length`` joins
batches of equal lengths. With W <= G ranks each takes G / W of them one after the other, divided so that ranks take
equally long. With W > G each batch is cut into W / G slices of consecutive rows. If all batches of a step are one loss,
a rank takes its G / W batches together.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.batches import epoch_permutation
from raytriever.errors import UserError

# The generators that a forward pass may draw from, seeded by a position.


def seed_generators(*position: int) -> None:
    """Seeds torch, NumPy and Python, each by numbers of its own: a function of ``position`` alone (non-negative)."""
    import torch

    words = np.random.SeedSequence(position).generate_state(3)
    for_torch, for_numpy, for_python = (int(word) for word in words)
    torch.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)


GROUPED_STEPS = 64
"""The batches of so many steps are exchanged between them where they are grouped by length."""


@dataclass(frozen=True)
class Piece:
    """The input of one forward pass: whole stored ``batches``, or slice ``part`` of ``parts`` of a single one."""

    batches: tuple[int, ...]
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank. ``number`` counts over the run, ``step`` within the epoch, both from 0.

    ``batches`` are those of all ranks, ``pieces`` those of this rank, at ``places`` among the pieces of all ranks.
    """

    number: int
    epoch: int
    step: int
    batches: tuple[int, ...]
    pieces: tuple[Piece, ...]
    places: tuple[int, ...]


def can_share(batches_per_step: int, workers: int) -> bool:
    """Whether so many workers can share a step evenly: as whole batches, or as equal slices of each."""
    return max(batches_per_step, workers) % min(batches_per_step, workers) == 0


class Order:
    """The steps of a run. ``batches_in_epoch``: stored batches of each epoch, in epoch order.

    ``joined``: all batches of a step are one loss. A step has ``pieces_per_step`` losses over all ranks, and
    ``ranks_per_loss`` consecutive ranks share one. ``lengths`` guesses how long a batch takes, by its epoch and number,
    in any unit. None: all take equally long. ``group_by_length``: a step has batches that take about equally long.
    Raises ``UserError`` where ``batches_per_step`` and ``world_size`` don't divide one another, or an epoch is too
    small for a single step.
    """

    def __init__(
        self,
        batches_in_epoch: Sequence[int],
        batches_per_step: int,
        seed: int,
        world_size: int = 1,
        rank: int = 0,
        max_steps: int | None = None,
        *,
        joined: bool = False,
        lengths: Callable[[int, int], int] | None = None,
        group_by_length: bool = False,
    ) -> None:
        if not can_share(batches_per_step, world_size):
            raise UserError(
                f"batches_per_step {batches_per_step} and {world_size} ranks don't divide one another, so a step"
                " can't be divided evenly. Set batches_per_step to a multiple of the ranks, or to a divisor of"
                " them (each batch is then cut into slices)."
            )
        for epoch, count in enumerate(batches_in_epoch):
            if count < batches_per_step:
                raise UserError(
                    f"Epoch {epoch} has {count} stored batches, fewer than the {batches_per_step} of one step"
                    " (batches_per_step). Lower batches_per_step, or pack smaller batches or more data."
                )
        larger = max(batches_per_step, world_size)
        self.batches_per_step = batches_per_step
        self.pieces_per_step = world_size if joined else larger
        self.slices_per_batch = larger // batches_per_step
        self.ranks_per_loss = world_size if joined else self.slices_per_batch
        self._batches_per_piece = max(1, batches_per_step // self.pieces_per_step)
        self._counts = tuple(batches_in_epoch)
        self._seed = seed
        pieces = self.pieces_per_step // world_size
        self._own = range(rank * pieces, (rank + 1) * pieces)
        self._world_size, self._rank = world_size, rank
        self._dealt_by = lengths if pieces > 1 else None
        self._grouped_by = lengths if group_by_length else None
        steps = sum(count // batches_per_step for count in batches_in_epoch)
        self.total_steps = steps if max_steps is None else min(steps, max_steps)

    @property
    def dropped_batches(self) -> tuple[int, ...]:
        """Batches of each epoch that are left over after its last whole step; other ones every epoch."""
        return tuple(count % self.batches_per_step for count in self._counts)

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """The steps done when each epoch of the run ends; the last epoch may be cut short."""
        ends = itertools.accumulate(count // self.batches_per_step for count in self._counts)
        reached = [min(end, self.total_steps) for end in ends]
        return tuple(dict.fromkeys(reached))

    def steps(self, start: int = 0) -> Iterator[Step]:
        """This rank's steps from the run's step ``start`` on."""
        first = 0
        for epoch, count in enumerate(self._counts):
            last = min(first + count // self.batches_per_step, self.total_steps)
            if max(start, first) < last:
                permutation = self._permutation(epoch, count)
                for number in range(max(start, first), last):
                    yield self._step(number, epoch, number - first, permutation)
            first = last

    def _permutation(self, epoch: int, count: int) -> NDArray[np.int64]:
        """The batches of an epoch as they are consumed."""
        drawn = epoch_permutation(self._seed, epoch, count)
        if self._grouped_by is None:
            return drawn
        lengths = np.array([self._grouped_by(epoch, batch) for batch in range(count)])
        return group_by_length(drawn, lengths, self.batches_per_step)

    def _step(self, number: int, epoch: int, step: int, permutation: NDArray[np.int64]) -> Step:
        chosen = permutation[step * self.batches_per_step : (step + 1) * self.batches_per_step]
        batches = tuple(int(batch) for batch in chosen)
        places = self._places(epoch, batches)
        return Step(number, epoch, step, batches, tuple(self.piece(batches, place) for place in places), places)

    def _places(self, epoch: int, batches: Sequence[int]) -> tuple[int, ...]:
        """Places of this rank's pieces."""
        if self._dealt_by is None:
            return tuple(self._own)
        return deal([self._dealt_by(epoch, batch) for batch in batches], self._world_size)[self._rank]

    def piece(self, batches: tuple[int, ...], place: int) -> Piece:
        """The piece at ``place`` of a step of these ``batches``, over all ranks."""
        if self.slices_per_batch > 1:
            number, part = divmod(place, self.slices_per_batch)
            return Piece((batches[number],), part, self.slices_per_batch)
        first = place * self._batches_per_piece
        return Piece(batches[first : first + self._batches_per_piece])


def group_by_length(drawn: NDArray[np.int64], lengths: NDArray[np.int64], batches_per_step: int) -> NDArray[np.int64]:
    """Orders the batches in ``drawn`` (n,) so that those of a step have about the same of ``lengths`` (n,).

    Batches change places within ``GROUPED_STEPS`` steps, so early ones stay early. Steps are ordered by the first draw
    among their batches. The remainder after the last whole step stays the remainder.
    """
    whole = len(drawn) // batches_per_step * batches_per_step
    grouped = drawn.copy()
    for begin in range(0, whole, GROUPED_STEPS * batches_per_step):
        window = drawn[begin : min(begin + GROUPED_STEPS * batches_per_step, whole)]
        steps = np.argsort(lengths[window], kind="stable").reshape(-1, batches_per_step)
        steps = steps[np.argsort(steps.min(axis=1))]
        grouped[begin : begin + len(window)] = window[np.sort(steps, axis=1).ravel()]
    return grouped


def deal(lengths: Sequence[int], shares: int) -> list[tuple[int, ...]]:
    """Divides places of ``lengths`` into shares of equal number and nearly equal sum.

    The longest first, each goes to the share with the lowest sum so far, among those that are not full.
    """
    size = len(lengths) // shares
    least = [(0, share) for share in range(shares)]
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length, share = heapq.heappop(least)
        dealt[share].append(place)
        if len(dealt[share]) < size:
            heapq.heappush(least, (length + lengths[place], share))
    return [tuple(sorted(places)) for places in dealt]


def seed_randomness(seed: int, step: Step, piece: Piece) -> None:
    """Seeds every generator that a forward pass may draw from by the position of its piece.

    What a piece draws does not depend on what ran before it in the process, so a resumed run draws the same.
    """
    seed_generators(seed, step.epoch, step.step, piece.batches[0], piece.part)
