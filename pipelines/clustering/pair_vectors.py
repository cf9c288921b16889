"""The vectors of pairs, row by row wherever they are kept: in memory, in mapped files, or in an artifact."""

from copy import copy
from functools import lru_cache
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.collections.collection import TextPart
from retrieval.vectors import StoredVectors, VectorRows

Rows = NDArray[np.int64]
Places = slice | Rows


class PairVectors(Protocol):
    """Query and document vectors of numbered pairs. A subset is a description, cheap to send to a worker."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def __len__(self) -> int: ...

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Query and document vectors (n, dimension) of the pairs at ``places``, in that order."""
        ...

    def subset(self, places: Places) -> "PairVectors":
        """The pairs at ``places``, numbered anew from 0."""
        ...


_TYPES = {np.dtype(np.float16), np.dtype(np.float32)}


class ArrayPairs:
    """Row i of two arrays (N, dimension) is pair i; float16 or float32, may be memory-mapped. Raises ``UserError``."""

    def __init__(self, *, queries: NDArray[np.floating], documents: NDArray[np.floating]) -> None:
        if queries.ndim != 2 or queries.shape != documents.shape or not {queries.dtype, documents.dtype} <= _TYPES:
            raise UserError(
                f"Queries are {queries.dtype} of shape {queries.shape}, documents {documents.dtype} of"
                f" {documents.shape}. Give float16 or float32, a row for each pair."
            )
        self._queries, self._documents, self._numbers = queries, documents, np.arange(len(queries))
        self.dimension = int(queries.shape[1])

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Rows of both arrays."""
        rows = self._numbers[places]
        return self._queries[rows], self._documents[rows]

    def subset(self, places: Places) -> Self:
        """Their row numbers; vectors are gathered when taken."""
        part = copy(self)
        part._numbers = self._numbers[places]
        return part


class SwappedPairs:
    """Pairs, some with query and document exchanged."""

    def __init__(self, pairs: PairVectors, swapped: NDArray[np.bool_]) -> None:
        self._pairs, self._swapped = pairs, swapped
        self.dimension = pairs.dimension

    def __len__(self) -> int:
        return len(self._swapped)

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """The vectors of queries and documents, exchanged for swapped pairs."""
        queries, documents = self._pairs.take(places)
        swapped = self._swapped[places][:, None]
        return np.where(swapped, documents, queries), np.where(swapped, queries, documents)

    def subset(self, places: Places) -> "SwappedPairs":
        """Some of them."""
        return SwappedPairs(self._pairs.subset(places), self._swapped[places])


def both_orientations(pairs: PairVectors) -> SwappedPairs:
    """All pairs as they are, then all with query and document exchanged: 2N of them, no vector copied."""
    count = len(pairs)
    return SwappedPairs(pairs.subset(np.tile(np.arange(count), 2)), np.repeat([False, True], count))


Sides = Literal["both", "queries"]


class StoredPairs:
    """Pairs with vectors in an artifact, read through its memory maps wherever a part of them is needed.

    Pair i has the query and the document vector in these rows of a collection. With ``sides`` queries, the query's
    vector is used for both, and documents need no vectors.
    """

    def __init__(self, vectors: StoredVectors, *, query_rows: Rows, document_rows: Rows, sides: Sides = "both") -> None:
        self._uri, self._fingerprint = vectors.uri, vectors.fingerprint
        self._query_rows, self._document_rows, self._sides = query_rows, document_rows, sides
        self.dimension = vectors.part("queries").dimension

    def __len__(self) -> int:
        return len(self._query_rows)

    def take(self, places: Places) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both sides, float32 (n, dimension)."""
        queries = opened_part(self._uri, self._fingerprint, "queries").gather(self._query_rows[places])
        if self._sides == "queries":
            return queries, queries
        return queries, opened_part(self._uri, self._fingerprint, "documents").gather(self._document_rows[places])

    def subset(self, places: Places) -> "StoredPairs":
        """The rows of some."""
        part = copy(self)
        part._query_rows, part._document_rows = self._query_rows[places], self._document_rows[places]
        return part


@lru_cache(maxsize=4)
def opened_part(uri: str, fingerprint: str, part: TextPart) -> VectorRows:  # noqa: ARG001
    """The maps of a part, opened once a process for all pieces of it; ``fingerprint``: another artifact, other maps."""
    return StoredVectors(uri).part(part)
