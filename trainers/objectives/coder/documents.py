"""The frozen documents of training: float16 vectors, memory-mapped or resident on a device, fetched by row."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.vectors import ROW, StoredVectors

ABSENT = -1
"""In a table of candidates' rows: nothing is there."""


@dataclass(frozen=True)
class Pool:
    """The distinct documents of some lists.

    ``rows``: int64 (M,), ascending; ``places``: int64 (B, N), where in ``rows`` each candidate is, M for none.
    """

    rows: Tensor
    places: Tensor


class DocumentVectors:
    """The documents' vectors of an artifact under the collection's row numbers, or one of ``shares`` equal parts.

    A share opens the files with its own rows alone, [``first``, ``last``). Memory: what is asked for, and on a device
    what ``load`` puts there. Raises ``UserError`` where documents have several vectors, or not all were embedded.
    """

    def __init__(self, vectors: StoredVectors, share: int = 0, shares: int = 1) -> None:
        self.uri = vectors.uri
        self.dimension = vectors.contract.dimension
        files = list(_files(vectors))
        starts = np.cumsum([0, *(count for _, count in files)])
        self.total = int(starts[-1])
        self.first, self.last = (self.total * end // shares for end in (share, share + 1))
        self._maps: list[Tensor] = []
        begins = [self.first]
        for (name, _), start, end in zip(files, starts[:-1], starts[1:], strict=True):
            if start < self.last and end > self.first:
                wanted = slice(max(self.first - start, 0), min(self.last, end) - start)
                self._maps.append(_mapped(vectors, name, self.dimension)[wanted])
                begins.append(int(min(self.last, end)))
        self._begins = torch.tensor(begins)
        self._resident: Tensor | None = None
        self._buffers: list[Tensor] = []  # that nobody reads any more

    def pool(self, rows: Tensor) -> Pool:
        """Which of these documents the lists name: ``rows`` int64 (B, N), ``ABSENT`` where a list is shorter.

        Those of another share count as none. Raises ``UserError`` for a row that the collection doesn't have.
        """
        flat = rows.numpy()
        if flat.max(initial=ABSENT) >= self.total:
            raise UserError(
                f"A list names document row {flat.max()}, but {self.uri} has vectors of {self.total:,} documents. Make"
                " batches and vectors from one collection."
            )
        here = (flat >= self.first) & (flat < self.last)
        distinct, inverse = np.unique(flat[here], return_inverse=True)
        places = np.full(flat.shape, len(distinct))
        places[here] = inverse
        return Pool(torch.from_numpy(distinct), torch.from_numpy(places))

    def load(self, device: torch.device) -> None:
        """Keeps the share's vectors in the memory of ``device`` from now on: 2 bytes a number."""
        if self._resident is None or self._resident.device != device:
            parts = self._maps or [torch.empty(0, self.dimension, dtype=torch.float16)]
            self._resident = torch.cat([*(part.to(device) for part in parts), _zeros(self.dimension).to(device)])

    def gather(self, rows: Tensor) -> Tensor:
        """The vectors of ``rows`` (M,), ascending, and a last one of zeros: float16 (M + 1, d).

        The files are read forwards, each by one call, into one buffer: pinned where there is a GPU, else one that is
        used again when the result is no more (views of it must not outlive it).
        """
        if self._resident is not None:
            local = torch.cat([rows - self.first, rows.new_tensor([self.last - self.first])])
            return self._resident.index_select(0, local.to(self._resident.device))
        result = self._buffer(len(rows) + 1)
        result[-1] = 0
        ends = torch.searchsorted(rows, self._begins).tolist()
        for vectors, (start, end), begin in zip(self._maps, pairwise(ends), self._begins.tolist(), strict=False):
            if start < end:
                torch.index_select(vectors, 0, rows[start:end] - begin, out=result[start:end])
        return result

    def _buffer(self, rows: int) -> Tensor:
        """Memory of its own for each result that lives; fresh pages would take as long as filling them."""
        if torch.cuda.is_available():  # whose allocator keeps pinned memory, and knows which copies are under way
            return torch.empty(rows, self.dimension, dtype=torch.float16, pin_memory=True)
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, self.dimension, dtype=torch.float16)
        if len(buffer) < rows:
            buffer = torch.empty(rows, self.dimension, dtype=torch.float16)
        result = buffer[:rows]
        weakref.finalize(result, self._buffers.append, buffer).atexit = False
        return result


def _files(vectors: StoredVectors) -> Iterator[tuple[str, int]]:
    """Each file of documents' vectors with its number of rows, which the manifest mostly tells without opening it."""
    for shard in vectors.shards:
        names = [f.name for f in shard.files if f.name.startswith("documents/") and f.name.endswith(".npy")]
        for name in names:
            known = shard.counts.get("documents") if len(names) == 1 else None
            yield name, len(np.load(vectors.path(name), mmap_mode="r")) if known is None else known
    if not vectors.names("documents/", ".npy"):
        raise UserError(f"{vectors.uri} holds no vectors of documents. Embed with parts including 'documents'.")


def _mapped(vectors: StoredVectors, name: str, dimension: int) -> Tensor:
    ids = pq.read_schema(vectors.path(name.removesuffix(".npy") + ".ids.parquet"))
    if ROW in ids.names:
        raise UserError(
            f"{vectors.uri} holds vectors of a run's documents alone. Embed the whole collection for this: leave the"
            " embed job's 'run' out."
        )
    mapped = np.load(vectors.path(name), mmap_mode="c")  # as 'r', but for torch's warning; nothing is ever written
    if mapped.ndim != 2:
        raise UserError(
            f"{vectors.uri} has {mapped.shape[1]} vectors of each document; lists are trained on with one of each."
            " Embed with an encoder of one vector a document."
        )
    if mapped.shape[1] != dimension or mapped.dtype != np.float16:
        raise UserError(f"{vectors.path(name)} holds {mapped.dtype} {mapped.shape}, not float16 (n, {dimension}).")
    return torch.from_numpy(mapped)


def _zeros(dimension: int) -> Tensor:
    return torch.zeros(1, dimension, dtype=torch.float16)
