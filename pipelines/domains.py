"""Domains as numbers: a column of names, table after table, in little memory."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


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
        encoded = column.combine_chunks().dictionary_encode()
        numbers = [self._number_of.setdefault(name, len(self._number_of)) for name in encoded.dictionary.to_pylist()]
        found: NDArray[np.int64] = np.array(numbers, dtype=np.int64)[encoded.indices.to_numpy()]
        return found
