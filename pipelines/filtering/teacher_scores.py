"""What a teacher says of a query and a document: a score for each pair that it was asked about."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.filtering.false_negatives import pair_keys


@dataclass(frozen=True)
class TeacherScores:
    """``keys`` int64 (pairs,), ascending, as of ``pair_keys``; ``scores`` float32 (pairs,). May be memory-mapped."""

    keys: NDArray[np.int64]
    scores: NDArray[np.float32]

    def of(self, query_rows: NDArray[np.int64], document_rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores of pairs (n,), NaN where the teacher gave none."""
        wanted = pair_keys(query_rows, document_rows)
        found = np.full(len(wanted), np.nan, dtype=np.float32)
        places = np.searchsorted(self.keys, wanted)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == wanted[known]
        found[known] = self.scores[places[known]]
        return found
