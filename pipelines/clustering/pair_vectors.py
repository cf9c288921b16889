"""The vectors of pairs, row by row wherever they are kept: in memory, in mapped files, or in an artifact."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from retrieval.collections.collection import TextPart
from retrieval.vectors import StoredVectors, VectorRows

Places = slice | NDArray[np.int64]


class PairVectors(Protocol):
    """Document and query vectors of numbered pairs. A subset is a description, cheap to send to a worker."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def __len__(self) -> int: ...

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Document and query vectors (n, dimension) of the pairs at ``places``, in that order."""
        ...

    def subset(self, places: Places) -> "PairVectors":
        """The pairs at ``places``, numbered anew from 0."""
        ...

    def name(self, place: int) -> str:
        """What to call a pair in a message."""
        ...


class ArrayPairs:
    """Row i of two arrays (N, dimension) is pair i; float16 or float32, may be memory-mapped."""

    def __init__(
        self,
        documents: NDArray[np.floating],
        queries: NDArray[np.floating],
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        self._documents, self._queries, self._numbers = documents, queries, numbers

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._documents.shape[1])

    def __len__(self) -> int:
        return len(self._documents if self._numbers is None else self._numbers)

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Rows of both arrays."""
        rows = places if self._numbers is None else self._numbers[places]
        return self._documents[rows], self._queries[rows]

    def subset(self, places: Places) -> Self:
        """Views where ``places`` is a slice of the whole; else row numbers, gathered when taken."""
        if self._numbers is not None:
            return type(self)(self._documents, self._queries, self._numbers[places])
        if isinstance(places, slice):
            return type(self)(self._documents[places], self._queries[places])
        return type(self)(self._documents, self._queries, places)

    def name(self, place: int) -> str:
        """By number."""
        return f"pair {place} (counted from 0)"


class SwappedPairs:
    """Pairs of which some have document and query exchanged."""

    def __init__(self, pairs: PairVectors, swapped: NDArray[np.bool_]) -> None:
        self._pairs, self._swapped = pairs, swapped

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._pairs.dimension

    def __len__(self) -> int:
        return len(self._pairs)

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """What stands for document and query."""
        documents, queries = self._pairs.take(places)
        swapped = self._swapped[places][:, None]
        if not swapped.any():
            return documents, queries
        return np.where(swapped, queries, documents), np.where(swapped, documents, queries)

    def subset(self, places: Places) -> "SwappedPairs":
        """Some of them."""
        return SwappedPairs(self._pairs.subset(places), self._swapped[places])

    def name(self, place: int) -> str:
        """As the pair is called."""
        return self._pairs.name(place)


class BothOrientations:
    """All pairs as they are, then all with document and query exchanged: 2N of them, no vector copied."""

    def __init__(self, pairs: PairVectors) -> None:
        self._pairs = pairs

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._pairs.dimension

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    def take(self, places: Places) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """What stands for document and query."""
        return self.subset(places).take(slice(None))

    def subset(self, places: Places) -> SwappedPairs:
        """Some of them."""
        count = len(self._pairs)
        if isinstance(places, slice):
            begin, end, _ = places.indices(len(self))
            if end <= count or begin >= count:
                shift = count if begin >= count else 0
                kept = slice(begin - shift, end - shift)
                return SwappedPairs(self._pairs.subset(kept), np.full(end - begin, shift > 0))
            places = np.arange(begin, end)
        return SwappedPairs(self._pairs.subset(places % count), places >= count)

    def name(self, place: int) -> str:
        """As the pair is called."""
        return self._pairs.name(place % len(self._pairs))


Sides = Literal["both", "queries"]


class StoredPairs:
    """Pairs whose vectors are in an artifact, read through its memory maps wherever a part of them is needed.

    Pair i has the document and the query vector in these rows of a collection. ``sides`` queries: the query's vector
    stands for both, documents need no vectors. ``name_of`` names pair i in messages; subsets, which travel to workers,
    go without.
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
