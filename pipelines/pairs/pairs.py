"""Training pairs: a query and a document that answers it, by row number in their collection."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError

PAIRS = "pairs"
POSITIVES = "positives.npy"
"""``pair_keys`` of all known relevant pairs, ascending: the pairs, and what else is judged so, of any grade, in the
splits of the pairs. Pairs that were left out as repeats are still known positives."""

SCHEMA = pa.schema(
    [
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("query_row", pa.int64(), nullable=False),
        pa.field("document_row", pa.int64(), nullable=False),
    ]
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
    chunks = (
        column.dictionary_encode().chunks
    )  # chunks share a dictionary, and may be longer together than a string array
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
    return groups.astype(np.int64)
