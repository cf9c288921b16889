"""Vectors as an artifact: memory-mapped half-precision shards with their ids beside them."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact, ShardFile
from raytriever.artifacts.long_columns import joined
from raytriever.errors import UserError
from retrieval.collections.collection import TextPart
from retrieval.encoders.specification import EncoderContract

VECTORS = "vectors"
ROW = "row"
_MOST_MAPS = 16_384  # of a part; Linux gives a process 65,530 for all that it maps


class StoredVectors(Artifact):
    """Opens a vectors artifact; shards are read through memory maps, never whole.

    Files: ``<part>/<number>.npy`` float16 (rows, dimension), or (rows, m, dimension) where a text has m vectors.
    ``<part>/<number>.ids.parquet`` has a column ``id``, and ``row`` if only some texts of the collection were embedded.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri, VECTORS)
        facts = self.manifest["facts"]
        self.contract = EncoderContract.model_validate(facts["encoder"])
        self.with_title = bool(facts.get("with_title", True))

    def part(self, part: TextPart) -> "VectorRows":
        """The vectors of documents or of queries. Raises ``UserError`` where they were not embedded."""
        stored = [self.listed(name) for name in self.names(f"{part}/", ".npy")]
        if not stored:
            raise UserError(f"{self.uri} holds no vectors of {part}. Embed with parts including '{part}'.")
        return VectorRows(self, stored)


class VectorRows:
    """The vectors of one part under one row numbering (that of the collection they were made from).

    A file is opened (and copied from an object store) when one of its rows is asked for. So few rows of a large part
    need few files. The last ones stay open. A file's number of rows follows from its bytes in the manifest.
    """

    def __init__(self, artifact: StoredVectors, files: Sequence[ShardFile]) -> None:
        self._artifact = artifact
        names = self._names = [file.name for file in files]
        self._file = lru_cache(_MOST_MAPS)(
            lambda shard: np.asarray(np.load(artifact.path(names[shard]), mmap_mode="r"))
        )
        first = self._file(0)
        self._shape: tuple[int, ...] = first.shape[1:]
        header, row = files[0].bytes - first.nbytes, first.itemsize * math.prod(self._shape)
        self._starts = np.cumsum([0, *((file.bytes - header) // row for file in files)])
        self._chosen = self._read_chosen()

    def _read_chosen(self) -> NDArray[np.int64] | None:
        """The collection's rows that are here, ascending; None where all are."""
        if ROW not in pq.read_schema(self._ids_path(self._names[0])).names:
            return None
        tables = [pq.read_table(self._ids_path(name), columns=[ROW]) for name in self._names]
        return np.concatenate([table[ROW].to_numpy() for table in tables])

    def _ids_path(self, name: str) -> Path:
        return self._artifact.path(name.removesuffix(".npy") + ".ids.parquet")

    def require_all(self) -> None:
        """Raises ``UserError`` where only some texts of the collection were embedded."""
        if self._chosen is not None:
            raise UserError(
                f"{self._artifact.uri} holds only vectors of a ranking's texts, or of some splits' queries. Embed"
                " the whole collection for this: leave the embed job's 'run' and 'splits' out."
            )

    def require_one(self) -> None:
        """Raises ``UserError`` where a text has several vectors."""
        if self.vectors_per_text > 1:
            part = self._names[0].partition("/")[0]
            raise UserError(
                f"{self._artifact.uri} has {self.vectors_per_text} vectors for each of its {part}, and one of each is"
                " needed here. Embed with an encoder that gives one."
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._shape[-1]

    @property
    def vectors_per_text(self) -> int:
        """Vectors of one row: 1, or m where an encoder gives a text several."""
        return math.prod(self._shape[:-1])

    def ids(self, start: int = 0, stop: int | None = None) -> pa.ChunkedArray:
        """The ids of rows ``start`` to ``stop``; only the files that hold some are read."""
        stop = len(self) if stop is None else stop
        pieces: list[pa.Array] = []
        for name, first, after in zip(self._names, self._starts[:-1], self._starts[1:], strict=True):
            if first < stop and after > start:
                column = pq.read_table(self._ids_path(name), columns=["id"])["id"]
                pieces += column.slice(max(0, start - first), min(stop, after) - max(start, first)).chunks
        return joined(pieces)

    def gather(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The given rows, float32 (n, dimension) or (n, m, dimension), in the given order; or written to ``out``.

        Raises ``UserError`` for a row that was not embedded.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self._chosen is not None:
            rows = self._places(rows, self._chosen)
        result = np.empty((len(rows), *self._shape), dtype=np.float32) if out is None else out
        order = np.argsort(rows, kind="stable")  # the disk is read forwards
        rows = rows[order]
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self):
            raise IndexError(f"rows {rows[0]} to {rows[-1]} of {len(self)}")
        bounds = np.searchsorted(rows, self._starts)
        for shard in np.flatnonzero(np.diff(bounds)).tolist():
            of_shard = slice(bounds[shard], bounds[shard + 1])
            result[order[of_shard]] = self._file(shard)[rows[of_shard] - self._starts[shard]]
        return result

    def _places(self, rows: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        places = np.minimum(np.searchsorted(chosen, rows), len(chosen) - 1)
        absent = np.flatnonzero(chosen[places] != rows)
        if len(absent):
            raise UserError(
                f"{self._artifact.uri} holds no vector of row {rows[absent[0]]} ({len(absent)} of {len(rows)} are"
                " missing). It was embedded for another ranking, for fewer of its results, or for other splits."
                " Embed with that ranking."
            )
        return places

    def range(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop``, float32."""
        return self.gather(np.arange(start, stop))

    def blocks(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first row, vectors) of consecutive blocks of at most ``size`` rows, from ``start`` to ``stop``."""
        stop = len(self) if stop is None else stop
        for first in range(start, stop, size):
            yield first, self.range(first, min(first + size, stop))
