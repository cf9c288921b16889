"""Sets of strings in eight bytes each: which ids were seen, for corpora whose ids fill memory as strings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raytriever.hashes import string_hashes


class DigestSet:
    """Remembers 64-bit digests of strings, given in batches.

    Two of n strings share a digest with probability n² / 2⁶⁵ (three in a million for ten million): whoever is about to
    report a repetition compares the strings themselves first.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []  # sorted, each at least twice as long as the next

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, strings: Sequence[str]) -> NDArray[np.bool_]:
        """Adds all; says of each (n,) whether it was new, the first of equal ones in the batch being so."""
        digests = string_hashes(strings)
        distinct, first = np.unique(digests, return_index=True)
        known = self._contain(distinct)
        new = np.zeros(len(digests), dtype=bool)
        new[first[~known]] = True
        self._append(distinct[~known])
        return new

    def contain(self, strings: Sequence[str]) -> NDArray[np.bool_]:
        """Says of each (n,) whether it was added."""
        return self._contain(string_hashes(strings)) if self._runs else np.zeros(len(strings), dtype=bool)

    def _contain(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        found = np.zeros(len(digests), dtype=bool)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, digests), len(run) - 1)
            found |= run[places] == digests
        return found

    def _append(self, digests: NDArray[np.uint64]) -> None:
        if not len(digests):
            return
        self._runs.append(digests)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")  # a merge of two sorted runs takes linear time
            self._runs.append(merged)
