"""Which candidates each query of a batch is trained with: its positives, and negatives of one kind."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.objectives.coder.documents import ABSENT

Negatives = Literal["retrieved", "in_batch", "corpus"]


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
    documents: int,
) -> list[CandidateList]:
    """Each list with all its positives (grades of ``level`` and more), filled up to ``candidates`` with negatives.

    'retrieved': the others of the list, in its order, so that the best are kept. 'in_batch': drawn from the other lists
    of the batch, 'corpus': from all ``documents``; both without those of the query's own list, at random by its key,
    fewer where there are no more. ``candidates``: None is the length of the list. ``draw_keys`` has one for each list.
    """
    pool: NDArray[np.int64] | int = documents
    if negatives == "in_batch":
        pool = np.unique(np.concatenate([found.rows for found in lists]))
    composed = []
    for found, key in zip(lists, draw_keys, strict=True):
        positive = found.grades >= level
        length = len(found.rows) if candidates is None else candidates
        wanted = max(0, length - int(positive.sum()))
        if negatives == "retrieved":
            kept = positive | (np.cumsum(~positive) <= wanted)
            composed.append(CandidateList(found.rows[kept], found.grades[kept]))
            continue
        drawn = draw_others(pool, found.rows, wanted, key)
        unknown = np.full(len(drawn), np.nan, dtype=np.float32)
        composed.append(
            CandidateList(
                np.concatenate([found.rows[positive], drawn]), np.concatenate([found.grades[positive], unknown])
            )
        )
    return composed


def draw_others(pool: NDArray[np.int64] | int, own: NDArray[np.int64], wanted: int, key: str) -> NDArray[np.int64]:
    """``wanted`` of ``pool`` (or of 0 to ``pool`` - 1) without ``own``, without replacement; all where it has fewer."""
    generator = np.random.default_rng(list(hashlib.blake2b(key.encode(), digest_size=16).digest()))
    size = pool if isinstance(pool, int) else len(pool)
    chosen = generator.choice(size, size=min(size, wanted + len(own)), replace=False)
    drawn = chosen if isinstance(pool, int) else pool[chosen]
    return drawn[~np.isin(drawn, own)][:wanted].astype(np.int64)


def padded(lists: Sequence[CandidateList]) -> tuple[Tensor, Tensor]:
    """Rows int64 (B, N), ``ABSENT`` behind a list's end, and labels float32 (B, N), -inf where there is none."""
    longest = max(1, *(len(found.rows) for found in lists))
    rows = np.full((len(lists), longest), ABSENT, dtype=np.int64)
    labels = np.full((len(lists), longest), -np.inf, dtype=np.float32)
    for place, found in enumerate(lists):
        rows[place, : len(found.rows)] = found.rows
        labels[place, : len(found.rows)] = np.where(np.isnan(found.grades), -np.inf, found.grades)
    return torch.from_numpy(rows), torch.from_numpy(labels)
