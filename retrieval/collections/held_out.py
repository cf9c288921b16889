"""Queries that are held out from training where a collection has no splits of its own."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from raytriever.hashes import string_hashes
from raytriever.settings.configuration import Settings

TRAIN, NEW = "train", ("dev", "test")
FEWEST = 10
"""Judged queries that can be shared out."""
_ENOUGH = 50  # queries of a new split that are worth a fifth of all
_LARGEST_GROUP = 0.2  # of a new split


class NewSplits(Settings):
    """New splits 'dev' and 'test' for judgments without them, taken from 'train' or from the only split.

    Queries with a text or an answer's text in common stay together, so none is in training and in testing. An existing
    split of any source stays unchanged.
    """

    share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of all queries in a new split. It has at least 50 queries, or a fifth of all if that is fewer."""
    most: PositiveInt = 1_000
    """Most queries in a new split."""

    def size(self, queries: int) -> int:
        """Queries that a new split of so many is to have."""
        return min(self.most, max(round(self.share * queries), min(_ENOUGH, queries // 5)))

    @staticmethod
    def wanted(splits: Sequence[str]) -> tuple[str, list[str]]:
        """Beside ``splits``: the one that queries are taken from, and those that they are for."""
        taken_from = splits[0] if len(splits) == 1 else TRAIN
        return taken_from, [split for split in NEW if split not in splits or split == taken_from]


def held_out(
    ids: Sequence[str], queries: NDArray[np.int64], documents: NDArray[np.int64], sizes: Mapping[str, int]
) -> tuple[dict[str, NDArray[np.int64]], bool]:
    """The queries of each new split, ascending, at most as many as ``sizes`` says; drawn by the hashes of their ids.

    ``ids`` (Q,): of the queries. ``queries``, ``documents``, (judgments,): a query and a document that answers it, each
    counted from 0. Also returns whether queries that share a document, directly or through others, stay together. They
    don't where their groups are so large that splits would be half empty.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(ids)
    size = count + int(documents.max()) + 1
    edges = coo_array((np.ones(len(queries), bool), (queries, count + documents)), shape=(size, size))
    group_of = connected_components(edges, directed=False)[1][:count]
    found = _drawn(ids, group_of, sizes)
    if all(2 * len(found[split]) >= size for split, size in sizes.items()):
        return found, True
    return _drawn(ids, np.arange(count), sizes), False


def _drawn(ids: Sequence[str], group_of: NDArray[np.integer], sizes: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """Whole groups, one after the other in the order of their hashes, until each split is full."""
    keys = string_hashes(f"held out {id_}" for id_ in ids)
    order = np.lexsort((keys, group_of))
    _, first, members = np.unique(group_of[order], return_index=True, return_counts=True)
    group_keys = keys[order][first]  # the group's key is its least hash
    small = np.flatnonzero(members <= max(1.0, _LARGEST_GROUP * min(sizes.values())))
    by_key = small[np.argsort(group_keys[small], kind="stable")]
    filled = np.cumsum(members[by_key])
    found, begin = {}, 0
    for split, size in sizes.items():
        end = int(np.searchsorted(filled, (filled[begin - 1] if begin else 0) + size, side="right"))
        groups = by_key[begin:end]
        rows = [order[first[group] : first[group] + members[group]] for group in groups.tolist()]
        found[split] = np.sort(np.concatenate(rows)) if rows else np.empty(0, np.int64)
        begin = end
    return found
