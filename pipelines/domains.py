"""Domains: as numbers, a column of names after another in little memory, and what becomes of small ones."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError

SmallDomains = Literal["refuse", "merge", "drop"]
_NAMED = 8


class DomainNumbers:
    """Numbers domains in the order in which they first come."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """The domains, by number."""
        return list(self._number_of)

    def of(self, column: pa.ChunkedArray) -> NDArray[np.int64]:
        """The number of each name, (n,)."""
        found = [np.empty(0, dtype=np.int64)]
        for chunk in column.chunks:  # one by one: together they may be longer than Arrow's strings can be
            encoded = chunk.dictionary_encode()
            numbers = [
                self._number_of.setdefault(name, len(self._number_of)) for name in encoded.dictionary.to_pylist()
            ]
            found.append(np.array(numbers, dtype=np.int64)[encoded.indices.to_numpy()])
        return np.concatenate(found)


def keep_domains(
    names: Sequence[str],
    counts: NDArray[np.int64],
    smallest: int,
    small_domains: SmallDomains,
    what: str,
    limit: str = "the batch size",
) -> NDArray[np.int64]:
    """The group of each domain, int64 (domains,), in the order given, the merged one last; -1 where it is dropped.

    ``counts``: how many rows, in words ``what``, each domain has. Of those with fewer than ``smallest``, "merge" makes
    one group, dropped where even that is too small, "drop" none; "refuse" raises a ``UserError`` that names them. One
    is raised, too, where nothing is left. ``limit``: what a user may lower, in words.
    """
    small = counts < smallest
    if small.any() and small_domains == "refuse":
        listed = [f"{names[at] or '(none)'} ({counts[at]})" for at in np.flatnonzero(small)[:_NAMED]]
        raise UserError(
            f"{int(small.sum())} domains have fewer than {smallest} {what}, so they can't fill a batch:"
            f" {', '.join(listed)}{', …' if small.sum() > _NAMED else ''}. Set small_domains to merge (batch them"
            f" together) or drop, or lower {limit}."
        )
    groups = np.where(small, -1, np.cumsum(~small) - 1)
    if small_domains == "merge" and counts[small].sum() >= smallest:
        groups[small] = (~small).sum()
    if not (groups >= 0).any():
        raise UserError(
            f"No domain has {smallest} {what}, nor have all together ({int(counts.sum())}): there is not one batch."
            f" Lower {limit}, or bring more {what}."
        )
    return groups.astype(np.int64)
