"""Pairs whose vectors are in an artifact, read through its memory maps wherever a part of them is needed."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.clustering.pair_vectors import Places
from raytriever.retrieval.collections.stored import TextPart
from raytriever.retrieval.vectors import StoredVectors, VectorRows

Sides = Literal["both", "queries"]


class StoredPairs:
    """Pair i has the document and the query vector in these rows of a collection.

    ``sides`` queries: the query's vector stands for both, documents need no vectors. ``name_of`` names pair i in
    messages; subsets, which travel to workers, go without.
    """

    def __init__(
        self,
        vectors: StoredVectors,
        document_rows: NDArray[np.int64],
        query_rows: NDArray[np.int64],
        sides: Sides = "both",
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self._uri, self._fingerprint = vectors.uri, vectors.fingerprint
        self._document_rows, self._query_rows, self._sides = document_rows, query_rows, sides
        self._name_of = name_of
        self.dimension = vectors.part("queries").dimension

    def __len__(self) -> int:
        return len(self._query_rows)

    def take(self, places: Places) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both sides, float32 (n, dimension)."""
        queries = _part(self._uri, self._fingerprint, "queries").gather(self._query_rows[places])
        if self._sides == "queries":
            return queries, queries
        return _part(self._uri, self._fingerprint, "documents").gather(self._document_rows[places]), queries

    def subset(self, places: Places) -> "StoredPairs":
        """The rows of some."""
        part = StoredPairs.__new__(StoredPairs)
        part.__dict__ = self.__dict__ | {
            "_document_rows": self._document_rows[places],
            "_query_rows": self._query_rows[places],
            "_name_of": None,
        }
        return part

    def name(self, place: int) -> str:
        """By its ids where they are known."""
        return self._name_of(place) if self._name_of else f"pair {place} (counted from 0)"


@lru_cache(maxsize=4)
def _part(uri: str, fingerprint: str, part: TextPart) -> VectorRows:  # noqa: ARG001
    """The maps of a part, opened once a process for all pieces of it; ``fingerprint``: another artifact, other maps."""
    return StoredVectors(uri).part(part)
