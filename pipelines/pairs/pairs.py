"""Training pairs: a query and a document that answers it, by row number in their collection.

Which domains of them are clustered and packed together is a matter of their sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import schema_of

PAIRS = "pairs"
POSITIVES = "positives.npy"
"""``pair_keys`` of all known relevant pairs, ascending: the pairs, and what else is judged so, of any grade, in the
splits of the pairs. Pairs that were left out as repeats are still known positives."""

SCHEMA = schema_of(
    query_id=pa.string(),
    document_id=pa.string(),
    domain=pa.string(),
    query_row=pa.int64(),
    document_row=pa.int64(),
)
ChooseDocuments = Literal["drawn", "first"]


def read_positives(artifact: Artifact) -> NDArray[np.int64]:
    """Known positives of a pairs artifact, memory-mapped. As a plain array, because its slices cost less."""
    return np.asarray(np.load(artifact.path(POSITIVES), mmap_mode="r"))


def read_pairs(artifact: Artifact, columns: list[str]) -> pa.Table:
    """Columns of a pairs artifact, in pair order (a pair's number is its row here)."""
    return pa.concat_tables(pq.read_table(artifact.path(name), columns=columns) for name in artifact.names("pairs/"))


# Domains: as numbers, and how small ones are handled.

SmallDomains = Literal["refuse", "merge", "merge_all", "drop"]
_NAMED = 8


def numbered_domains(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each domain, (n,), by first occurrence, and the domains by number."""
    # chunks share a dictionary, and may be longer together than a string array
    chunks = column.dictionary_encode().chunks
    numbers = [np.zeros(0, dtype=np.int64), *(chunk.indices.to_numpy().astype(np.int64) for chunk in chunks)]
    return np.concatenate(numbers), chunks[-1].dictionary.to_pylist() if chunks else []


def are_small(counts: NDArray[np.int64], smallest: int, small_domains: SmallDomains) -> NDArray[np.bool_]:
    """Whether a domain is no group of its own, (domains,): with "merge_all" none of several is."""
    return (counts < smallest) | (small_domains == "merge_all" and len(counts) > 1)


def keep_domains(
    names: Sequence[str],
    counts: NDArray[np.int64],
    smallest: int,
    small_domains: SmallDomains,
    what: str,
    limit: str = "the batch size",
) -> NDArray[np.int64]:
    """The group of each domain, int64 (domains,), in the order given, the merged one last; -1 where it is dropped.

    ``counts``: how many rows, in words ``what``, each domain has. "merge" makes one group of domains with fewer than
    ``smallest`` rows, and drops it if it is still too small. "drop" drops them, and "refuse" raises a ``UserError``
    that names them. "merge_all" makes one group of all domains. Raises ``UserError`` also if nothing is left.
    ``limit``: what a user can lower, in words.
    """
    small = are_small(counts, smallest, small_domains)
    if small.any() and small_domains == "refuse":
        listed = [f"{names[at] or '(none)'} ({counts[at]})" for at in np.flatnonzero(small)[:_NAMED]]
        raise UserError(
            f"{int(small.sum())} domains have fewer than {smallest} {what}, so they can't fill a batch:"
            f" {', '.join(listed)}{', …' if small.sum() > _NAMED else ''}. Set small_domains to merge (batch them"
            f" together) or drop, or lower {limit}."
        )
    groups = np.where(small, -1, np.cumsum(~small) - 1)
    if small_domains.startswith("merge") and counts[small].sum() >= smallest:
        groups[small] = (~small).sum()
    if not (groups >= 0).any():
        raise UserError(
            f"No domain has {smallest} {what}, and all together have {int(counts.sum())}, so no batch can be"
            f" filled. Lower {limit}, or bring more {what}."
        )
    return groups


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
