"""Grouping: chunks of a few documents to batches, a new grouping for every epoch (Revela, section 5.2).

A chunk is predicted from the others of its batch. So a batch has stretches of consecutive chunks from a few documents
of one domain, such as 7 of one article and 9 of another. The paper doesn't say how documents are cut and joined. Here
each is cut into stretches of about ``batch_size / documents_per_batch`` chunks. As few stretches as possible are joined
so that their lengths add up to a batch.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from raytriever.settings.configuration import Settings

_LOOKED_AT = 4  # stretches of a length, in search of one of another document


class GroupingSettings(Settings):
    """How chunks are grouped."""

    batch_size: int = Field(default=16, gt=1)
    """Number of chunks in a batch."""
    documents_per_batch: PositiveInt = 2
    """Approximate number of documents in a batch."""
    order: Literal["grouped", "random"] = "grouped"
    """grouped: a batch holds chunks of a few documents. random: it holds unrelated chunks of a domain, the paper's
    random ablation."""

    def _check(self) -> None:
        if self.documents_per_batch > self.batch_size:
            raise ValueError(
                f"documents_per_batch is {self.documents_per_batch}, but a batch has {self.batch_size} chunks. Lower it"
            )


@dataclass(frozen=True)
class Stretches:
    """Stretches of consecutive rows, int64 (n,) each.

    ``first``: the first row. ``lengths``: number of rows. ``documents``: the document of each. ``groups``: the group of
    each, because batches stay within a group; -1 for rows to leave alone.
    """

    first: NDArray[np.int64]
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    groups: NDArray[np.int64]

    def divided(self, most: int, seed: int) -> "Stretches":
        """Divides groups of more than ``most`` rows at random, stretch by stretch, into groups of about that size."""
        parts = np.maximum(1, -(-self.rows_of_groups() // most))
        drawn = np.random.default_rng(seed).random(len(self.groups)) * parts[self.groups]
        groups = np.where(self.groups < 0, -1, (np.cumsum(parts) - parts)[self.groups] + drawn.astype(np.int64))
        return replace(self, groups=groups)

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> "Stretches":
        """The chosen ones, by a mask or by number."""
        return Stretches(self.first[chosen], self.lengths[chosen], self.documents[chosen], self.groups[chosen])

    def rows(self) -> NDArray[np.int64]:
        """All their rows, stretch after stretch."""
        ends = np.cumsum(self.lengths)
        offsets = np.arange(self.lengths.sum()) - np.repeat(ends - self.lengths, self.lengths)
        rows: NDArray[np.int64] = np.repeat(self.first, self.lengths) + offsets
        return rows

    def rows_of_groups(self) -> NDArray[np.int64]:
        """Number of rows in each group, (groups,)."""
        counted = self.groups >= 0
        return np.bincount(self.groups[counted], self.lengths[counted]).astype(np.int64)


_FIELDS = [field.name for field in fields(Stretches)]


def single_rows(groups: NDArray[np.int64]) -> Stretches:
    """Rows that don't belong together, as stretches of one; ``groups`` (rows,)."""
    rows = np.arange(len(groups))
    return Stretches(rows, np.ones_like(rows), rows, groups)


def group_batches(
    stretches: Stretches, settings: GroupingSettings, seed: int, epoch: int, groups: slice = slice(None)
) -> NDArray[np.int64]:
    """One epoch's batches of these ``groups``, (batches, batch_size) rows, one after another: a function of its
    arguments alone.

    A row is in one batch at most. Of each group fewer than ``batch_size`` rows are left out, consecutive ones where
    they can be; over epochs these rotate through all of them. Within a batch rows are shuffled.
    """
    size = settings.batch_size
    order = np.argsort(stretches.groups, kind="stable")
    bounds = np.searchsorted(stretches.groups[order], np.arange(stretches.groups.max(initial=-1) + 2))
    batches = [np.empty((0, size), dtype=np.int64)]
    for group, (begin, end) in list(enumerate(pairwise(bounds.tolist())))[groups]:
        generator = np.random.default_rng([seed, epoch, group])
        used = without_remainder(stretches.where(order[begin:end]), size, seed, epoch, group)
        if settings.order == "random":
            rows = generator.permutation(used.rows())
        else:
            rows = join(cut(used, settings, generator), settings, generator).rows()
        batches.append(generator.permuted(rows.reshape(-1, size), axis=1))
    return np.concatenate(batches)


def without_remainder(stretches: Stretches, batch_size: int, seed: int, epoch: int, group: int) -> Stretches:
    """The stretches of one group less what is beyond its last full batch: the next rows of one fixed shuffle of them.

    Epoch after epoch goes on where the last one stopped, so that every row has its turn.
    """
    total = int(stretches.lengths.sum())
    remainder = total % batch_size
    if not remainder:
        return stretches
    shuffled = stretches.where(np.random.default_rng([seed, group]).permutation(len(stretches.first)))
    begin = epoch * remainder % total
    end = begin + remainder
    kept = [_between(shuffled, max(end - total, 0), begin), _between(shuffled, end, total)]
    return Stretches(*(np.concatenate([getattr(part, name) for part in kept]) for name in _FIELDS))


def _between(stretches: Stretches, begin: int, end: int) -> Stretches:
    """The stretches from row ``begin`` to ``end`` of all rows, stretch after stretch."""
    stops = np.cumsum(stretches.lengths)
    starts = stops - stretches.lengths
    low, high = np.maximum(starts, begin), np.minimum(stops, end)
    pieces = Stretches(stretches.first + low - starts, high - low, stretches.documents, stretches.groups)
    return pieces.where(low < high)


def cut(stretches: Stretches, settings: GroupingSettings, generator: np.random.Generator) -> Stretches:
    """Each stretch in equal parts of about ``batch_size / documents_per_batch`` rows.

    A length between two multiples of that is cut into one number of parts or the other. The choice is random and
    without bias, so epochs differ. No part fills a batch, unless a batch is to be of one document.
    """
    wanted = settings.batch_size / settings.documents_per_batch
    lengths = stretches.lengths
    parts = np.floor(lengths / wanted + generator.random(len(lengths))).astype(np.int64)
    parts = np.maximum(parts, -(-lengths // settings.batch_size))
    owners = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = number * lengths[owners] // parts[owners]
    ends = (number + 1) * lengths[owners] // parts[owners]
    first = stretches.first[owners] + begins
    return Stretches(first, ends - begins, stretches.documents[owners], stretches.groups[owners])


def join(parts: Stretches, settings: GroupingSettings, generator: np.random.Generator) -> Stretches:
    """Orders the parts so that their lengths add up to batch after batch. Some are cut once more to fit.

    The lengths must be multiples of ``batch_size`` together, and none above it. All parts of a batch but the last are
    drawn at random, so that short ones don't pile up at the end. The last is of another document if there is one.
    """
    size, others = settings.batch_size, settings.documents_per_batch - 1
    buckets = _LengthBuckets(parts.where(generator.permutation(len(parts.first))), size)
    chosen: list[_Part] = []
    for draws in generator.random((int(parts.lengths.sum()) // size, others + 1)).tolist():
        room, documents = size, set[int]()
        for place in range(size):
            part = buckets.draw(room - 1, draws[place]) if place < others else None
            part = part or buckets.fill(room, documents) or buckets.fill(room, set())
            assert part is not None
            chosen.append(part)
            documents.add(part[2])
            room -= part[1]
            if not room:
                break
    first, lengths, documents_ = np.array(chosen, dtype=np.int64).reshape(-1, 3).T
    return Stretches(first, lengths, documents_, np.resize(parts.groups, len(first)))  # one group, whatever the parts


_Part = tuple[int, int, int]  # first row, length, document


class _LengthBuckets:
    """Parts by length; each bucket in random order."""

    def __init__(self, parts: Stretches, longest: int) -> None:
        self._first, self._documents = _numbers(parts.first), _numbers(parts.documents)
        self._of_length = [_numbers(np.flatnonzero(parts.lengths == length)) for length in range(longest + 1)]

    def draw(self, longest: int, draw: float) -> _Part | None:
        """Any part no longer than that, by a number from 0 to 1."""
        buckets = self._of_length[: longest + 1]
        place = int(draw * sum(map(len, buckets)))
        for length, bucket in enumerate(buckets):
            if place < len(bucket):
                return self._taken(length, place)
            place -= len(bucket)
        return None

    def fill(self, room: int, documents: set[int]) -> _Part | None:
        """A part for the ``room`` rows that a batch has left, of none of the ``documents``.

        The first of these that exists: a part that fills the room, one that leaves room for another existing part, the
        beginning of a longer one, the longest.
        """
        fitting = (length for length in range(room - 1, 0, -1) if self._of_length[room - length])
        return (
            self._take([room], documents)
            or self._take(fitting, documents)
            or self._cut_longer(room, documents)
            or self._take(range(room - 1, 0, -1), documents)
        )

    def _cut_longer(self, room: int, documents: set[int]) -> _Part | None:
        longer = self._take(range(len(self._of_length) - 1, room, -1), documents)
        if longer is None:
            return None
        first, length, document = longer
        self._of_length[length - room].append(len(self._first))
        self._first.append(first + room)
        self._documents.append(document)
        return first, room, document

    def _take(self, lengths: Iterable[int], documents: set[int]) -> _Part | None:
        for length in lengths:
            bucket = self._of_length[length]
            for place in range(len(bucket) - 1, max(len(bucket) - 1 - _LOOKED_AT, -1), -1):
                if self._documents[bucket[place]] not in documents:
                    return self._taken(length, place)
        return None

    def _taken(self, length: int, place: int) -> _Part:
        bucket = self._of_length[length]
        bucket[place], bucket[-1] = bucket[-1], bucket[place]
        part = bucket.pop()
        return self._first[part], length, self._documents[part]


def _numbers(values: NDArray[np.int64]) -> "array[int]":
    """A compact array that grows, and gives its numbers out faster than NumPy does."""
    return array("q", values.astype(np.int64).tobytes())
