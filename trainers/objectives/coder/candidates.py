"""The candidates that each query of a batch is trained with, and their vectors.

A list has a query's positives, and negatives that were retrieved, that are drawn, or some of both. Its documents are
frozen: memory-mapped float16 vectors, fetched by row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytriever.errors import UserError
from retrieval.vectors import StoredVectors
from trainers.objectives.coder.settings import Negatives

ABSENT = -1
"""In a table of candidates' rows: nothing is there."""


@dataclass(frozen=True)
class CandidateList:
    """Documents of one query: ``rows`` int64 (n,), ``grades`` float32 (n,), NaN where one isn't judged."""

    rows: NDArray[np.int64]
    grades: NDArray[np.float32]


def stored_lists(batch: pa.Table) -> list[CandidateList]:
    """The lists of a stored batch, as they are."""
    ends = np.cumsum(pc.list_value_length(batch["candidate_rows"]).to_numpy())[:-1]
    rows = pc.list_flatten(batch["candidate_rows"]).to_numpy()
    grades = pc.list_flatten(batch["candidate_relevance"]).cast(pa.float32())
    grades = pc.fill_null(grades, float("nan")).to_numpy()
    return [CandidateList(*each) for each in zip(np.split(rows, ends), np.split(grades, ends), strict=True)]


def compose_lists(
    lists: Sequence[CandidateList],
    draw_keys: Sequence[str],
    *,
    level: float,
    candidates: int | None,
    negatives: Negatives,
    retrieved: int = 0,
    documents: int,
) -> list[CandidateList]:
    """Each list with all its positives (grades of ``level`` and more), filled up to ``candidates`` with negatives.

    'retrieved': the others of the list, in its order, so that the best are kept. 'in_batch': drawn from the other lists
    of the batch. 'corpus': drawn from all ``documents``. Both draw at random by the query's key, without documents of
    its own list, and fewer if there are no more. They follow the first ``retrieved`` negatives of that list.
    ``candidates``: None is the length of the list. ``draw_keys`` has one for each list.
    """
    pool: NDArray[np.int64] | int = documents
    if negatives == "in_batch":
        pool = np.unique(np.concatenate([found.rows for found in lists]))
    composed = []
    for found, key in zip(lists, draw_keys, strict=True):
        positive = found.grades >= level
        length = len(found.rows) if candidates is None else candidates
        wanted = max(0, length - int(positive.sum()))
        of_list = wanted if negatives == "retrieved" else min(retrieved, wanted)
        kept = positive | (np.cumsum(~positive) <= of_list)
        rows, grades = found.rows[kept], found.grades[kept]
        if negatives != "retrieved":
            drawn = draw_others(pool, found.rows, max(0, length - len(rows)), key)
            rows = np.concatenate([rows, drawn])
            grades = np.concatenate([grades, np.full(len(drawn), np.nan, dtype=np.float32)])
        composed.append(CandidateList(rows, grades))
    return composed


def draw_others(pool: NDArray[np.int64] | int, own: NDArray[np.int64], wanted: int, key: str) -> NDArray[np.int64]:
    """``wanted`` of ``pool`` (or of 0 to ``pool`` - 1) without ``own``, without replacement; all where it has fewer."""
    generator = np.random.default_rng(list(hashlib.blake2b(key.encode(), digest_size=16).digest()))
    size = pool if isinstance(pool, int) else len(pool)
    chosen = generator.choice(size, size=min(size, wanted + len(own)), replace=False)
    drawn = chosen if isinstance(pool, int) else pool[chosen]
    return drawn[~np.isin(drawn, own)][:wanted]


def padded(lists: Sequence[CandidateList]) -> tuple[Tensor, Tensor]:
    """Rows int64 (B, N), ``ABSENT`` behind a list's end, and labels float32 (B, N), -inf where there is none."""
    longest = max(1, *(len(found.rows) for found in lists))
    rows = np.full((len(lists), longest), ABSENT)
    labels = np.full((len(lists), longest), -np.inf, dtype=np.float32)
    for place, found in enumerate(lists):
        rows[place, : len(found.rows)] = found.rows
        labels[place, : len(found.rows)] = np.where(np.isnan(found.grades), -np.inf, found.grades)
    return torch.from_numpy(rows), torch.from_numpy(labels)


@dataclass(frozen=True)
class Pool:
    """The distinct documents of some lists.

    ``rows``: int64 (M,), ascending. ``places``: int64 (B, N), the place of each candidate in ``rows``, M for none.
    """

    rows: Tensor
    places: Tensor


class DocumentVectors:
    """The documents' vectors of an artifact under the collection's row numbers.

    Raises ``UserError`` where documents have several vectors, or not all were embedded.
    """

    def __init__(self, vectors: StoredVectors) -> None:
        self.uri = vectors.uri
        self._stored = vectors.part("documents")
        self._stored.require_all()
        self._stored.require_one()
        self.total = len(self._stored)

    def pool(self, rows: Tensor) -> Pool:
        """The documents that the lists name: ``rows`` int64 (B, N), ``ABSENT`` where a list is shorter.

        Raises ``UserError`` for a row that the collection doesn't have.
        """
        flat = rows.numpy()
        if flat.max() >= self.total:
            raise UserError(
                f"A list names document row {flat.max()}, but {self.uri} has vectors of {self.total:,} documents. Make"
                " batches and vectors from one collection."
            )
        is_there = flat != ABSENT
        distinct, inverse = np.unique(flat[is_there], return_inverse=True)
        places = np.full(flat.shape, len(distinct))
        places[is_there] = inverse
        return Pool(torch.from_numpy(distinct), torch.from_numpy(places))

    def gather(self, rows: Tensor) -> Tensor:
        """The vectors of ``rows`` int64 (M,), and a last one of zeros: float16 (M + 1, d), pinned where there is a GPU.

        The allocator keeps the memory of earlier ones: fresh pages would take as long as filling them.
        """
        shape = len(rows) + 1, self._stored.dimension
        result = torch.empty(shape, dtype=torch.float16, pin_memory=torch.cuda.is_available())
        result[-1] = 0
        self._stored.gather(rows.numpy(), out=result[:-1].numpy())
        return result
