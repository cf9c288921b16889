"""Which domains' pairs are clustered and packed together."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.pairs.pairs import SmallDomains, are_small, keep_domains, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError

MERGED = "(merged)"


@dataclass(frozen=True)
class DomainGroups:
    """Which pairs are clustered and packed together.

    ``names`` of the groups and their ``sizes``, in pairs. ``number_of``: the group of each domain in one. ``dropped``:
    pairs in no group.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    number_of: Mapping[str, int]
    dropped: int

    def table(self) -> pa.Table:
        """The ``domain`` and ``number`` of each domain that is in a group."""
        numbers = pa.array(self.number_of.values(), pa.int64())
        return pa.table({"domain": pa.array(self.number_of, pa.string()), "number": numbers})


def group_domains(
    domains: pa.ChunkedArray, smallest: int, small_domains: SmallDomains, limit: str = "the batch size"
) -> DomainGroups:
    """Which domains are clustered and packed alone, and how those with fewer than ``smallest`` items are handled.

    Call it before clustering, so that merged domains are clustered as one. ``keep_domains`` explains ``small_domains``
    and ``limit``. Groups are in the order of their names, the merged one last.
    """
    counted = pa.table({"name": domains}).group_by("name").aggregate([([], "count_all")]).sort_by("name")
    names, counts = counted["name"].to_pylist(), counted["count_all"].to_numpy()
    group_of = keep_domains(names, counts, smallest, small_domains, "pairs", limit)
    groups = [names[at] for at in np.flatnonzero(~are_small(counts, smallest, small_domains))]
    if group_of.max() == len(groups):
        if MERGED in groups:
            raise UserError(f"A domain is called {MERGED!r}, the name of the merged small domains. Rename it.")
        groups.append(MERGED)
    kept = group_of >= 0
    sizes = np.bincount(group_of[kept], counts[kept]).astype(np.int64)
    number_of = {name: number for name, number in zip(names, group_of.tolist(), strict=True) if number >= 0}
    return DomainGroups(tuple(groups), tuple(sizes.tolist()), number_of, int(counts[~kept].sum()))


def groups_of(
    pairs: Artifact, smallest: int, small_domains: SmallDomains, limit: str = "the batch size"
) -> DomainGroups:
    """``group_domains`` of a pairs artifact."""
    return group_domains(read_pairs(pairs, ["domain"])["domain"], smallest, small_domains, limit)
