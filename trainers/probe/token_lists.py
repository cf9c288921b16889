"""Texts as tokens, many in two arrays: read once, taken by rows in every step of a probe."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenLists:
    """Texts as tokens: text i has ``tokens[offsets[i] : offsets[i + 1]]``.

    ``tokens`` int32 (all tokens,), ``offsets`` int64 (texts + 1,); both may be memory-mapped.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "TokenLists":
        """Makes it from a list of tokens for each text."""
        offsets = np.cumsum([0, *map(len, lists)])
        return cls(np.fromiter((token for row in lists for token in row), np.int32, int(offsets[-1])), offsets)

    def take(self, rows: NDArray[np.int64]) -> "TokenLists":
        """Some texts, in this order."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.append(0, np.cumsum(lengths))
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return TokenLists(self.tokens[places], offsets)

    def with_more(self, other: "TokenLists") -> "TokenLists":
        """Appends the other's texts to its own."""
        offsets = np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return TokenLists(np.concatenate([self.tokens, other.tokens]), offsets)
