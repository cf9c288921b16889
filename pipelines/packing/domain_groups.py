"""Whose pairs are packed together: a domain's clusters, or, without clusters, a domain's pairs as they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.clustering.clusters import DomainPairs
from pipelines.pairs.pairs import DomainNumbers, SmallDomains, are_small, keep_domains, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError

MERGED = "(merged)"


@dataclass(frozen=True)
class DomainGroups:
    """Which items are clustered and packed together.

    ``labels`` int64 (N,): the group of each item, -1 where it is dropped; ``names`` of the groups; ``others``: the
    group of domains that have no group of their name.
    """

    labels: NDArray[np.int64]
    names: tuple[str, ...]
    others: int = -1

    @property
    def dropped(self) -> int:
        """Items in no group."""
        return int((self.labels < 0).sum())

    @property
    def sizes(self) -> list[int]:
        """Items of each group."""
        sizes: list[int] = np.bincount(self.labels[self.labels >= 0], minlength=len(self.names)).tolist()
        return sizes


def group_domains(
    domains: pa.ChunkedArray, smallest: int, small_domains: SmallDomains, limit: str = "the batch size"
) -> DomainGroups:
    """Which domains are clustered and packed alone, and what becomes of those with fewer than ``smallest`` items.

    To be called before clustering, so that domains that are merged are clustered as one; ``keep_domains`` says what
    ``small_domains`` and ``limit`` mean. Groups are in the order of their names, the merged one last.
    """
    names, codes = _in_order(domains)
    counts = np.bincount(codes, minlength=len(names))
    group_of, others = keep_domains(names, counts, smallest, small_domains, "pairs", limit), -1
    groups = [names[at] for at in np.flatnonzero(~are_small(counts, smallest, small_domains))]
    if group_of.max() == len(groups):
        if MERGED in groups:
            raise UserError(f"A domain is called {MERGED!r}, the name of the small domains merged. Rename it.")
        groups, others = [*groups, MERGED], len(groups)
    return DomainGroups(group_of[codes], tuple(groups), others)


def numbers_of(domains: pa.ChunkedArray, names: Sequence[str], others: int) -> NDArray[np.int64]:
    """The group of each item, int64 (N,), by the ``names`` of groups; ``others`` where its domain is none of them."""
    numbers = DomainNumbers()
    codes = numbers.of(domains)
    place = {name: number for number, name in enumerate(names)}
    return np.array([place.get(name, others) for name in numbers.names], dtype=np.int64)[codes]


def _in_order(column: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int64]]:
    """Sorted names, and the number of each item's name."""
    numbers = DomainNumbers()
    codes = numbers.of(column)
    return sorted(numbers.names), np.argsort(np.argsort(np.array(numbers.names, dtype=object)))[codes]


def groups_of(
    pairs: Artifact, smallest: int, small_domains: SmallDomains, limit: str = "the batch size"
) -> DomainGroups:
    """``group_domains`` of a pairs artifact."""
    return group_domains(read_pairs(pairs, ["domain"])["domain"], smallest, small_domains, limit)


def unclustered(groups: DomainGroups) -> Iterator[DomainPairs]:
    """Each group's pairs, as if they were of one cluster, which has no number."""
    by_group = np.argsort(groups.labels, kind="stable")
    bounds = np.searchsorted(groups.labels[by_group], np.arange(len(groups.names) + 1))
    for number, name in enumerate(groups.names):
        yield unclustered_domain(name, by_group[bounds[number] : bounds[number + 1]])


def unclustered_domain(name: str, pairs: NDArray[np.int64]) -> DomainPairs:
    """Pairs as if they were of one cluster, which has no number."""
    return DomainPairs(name, pairs, np.full(len(pairs), -1, dtype=np.int32), np.zeros((1, 1), dtype=np.float32))
