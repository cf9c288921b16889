"""The one order that every ranking has.

**The order**: score descending, then row ascending. Rows number the documents of a collection in its source's order. So
equal scores are in that order, whatever the number of shards, workers or blocks. It holds at the cut as well: among
documents that tie for the last place, the lowest rows are in.

A score and a row are packed into one int64 **key**, so that sorting keys sorts by both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

CANDIDATES_AT_ONCE = 1 << 22
"""Candidates of all queries of a block that are sorted at a time."""

LOW_BITS = 0xFFFFFFFF
"""The largest row that a key holds."""

ABSENT = -(1 << 63)
"""The key that stands for no document; below all others."""


@dataclass(frozen=True)
class Ranking:
    """The best documents of each query, in the order of this module.

    ``rows``: (queries, k) int64, row numbers of documents, -1 where a query has fewer than k.
    ``scores``: (queries, k) float32, -inf where ``rows`` is -1.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]

    @classmethod
    def empty(cls, queries: int, k: int) -> Self:
        """Without documents."""
        return cls(np.full((queries, k), -1), np.full((queries, k), -np.inf, dtype=np.float32))

    def put(self, place: slice | NDArray[np.int64], found: "Ranking") -> None:
        """Sets the rankings of the queries at ``place``."""
        self.rows[place], self.scores[place] = found.rows, found.scores


def merge_rankings(rankings: Sequence[Ranking], k: int) -> Ranking:
    """The ``k`` best documents of each query over the rankings of shards, in the defined order.

    Equals the ranking of one search over all rows, if each shard was searched for at least ``k``.
    """
    merged = Ranking.empty(len(rankings[0].rows), k)
    for block in query_blocks(len(merged.rows), sum(ranking.rows.shape[1] for ranking in rankings)):
        scores = np.concatenate([ranking.scores[block] for ranking in rankings], axis=1)
        rows = np.concatenate([ranking.rows[block] for ranking in rankings], axis=1)
        merged.put(block, best_candidates(scores, rows, k))
    return merged


def best_candidates(scores: NDArray[np.float32], rows: NDArray[np.int64], k: int) -> Ranking:
    """Orders candidates (queries, n), cut or padded to ``k``; row -1 with score -inf stands for none."""
    if rows.max(initial=-1) > LOW_BITS:  # beyond what a key holds
        order = np.lexsort((rows, -scores))[:, :k]
        ordered = Ranking(np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1))
    else:
        bits = ordered_bits((scores + np.float32(0)).view(np.int32))  # -0.0 and 0.0 are equal scores: equal bits
        keys = (bits.astype(np.int64) << 32) | (LOW_BITS - rows)
        keys[rows < 0] = ABSENT
        keys = np.sort(keys)[:, ::-1][:, :k]
        ordered = Ranking(LOW_BITS - (keys & LOW_BITS), ordered_bits((keys >> 32).astype(np.int32)).view(np.float32))
        is_absent = keys == ABSENT
        ordered.rows[is_absent], ordered.scores[is_absent] = -1, -np.inf
    padding = ((0, 0), (0, k - ordered.rows.shape[1]))
    return Ranking(
        np.pad(ordered.rows, padding, constant_values=-1), np.pad(ordered.scores, padding, constant_values=-np.inf)
    )


def ordered_bits(bits: Any) -> Any:
    """Whole numbers in the order of the float32 with these ``bits`` (int32, of NumPy or torch). Its own inverse.

    Floats order as their bits do, negative ones reversed.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def best_of_documents(ranking: Ranking, vectors_per_document: int, k: int) -> Ranking:
    """Ranks documents by their best vector. A document has ``vectors_per_document`` consecutive rows.

    Exact where ``ranking`` holds the best k · vectors_per_document.
    """
    found = Ranking.empty(len(ranking.rows), k)
    for block in query_blocks(len(ranking.rows), ranking.rows.shape[1]):
        documents, order, is_first = _by_row(ranking.rows[block] // vectors_per_document)  # -1 stays -1
        # of a document's vectors the best is first
        scores = np.where(is_first, np.take_along_axis(ranking.scores[block], order, axis=1), np.float32(-np.inf))
        found.put(block, best_candidates(scores, np.where(is_first, documents, -1), k))
    return found


def reciprocal_rank_fusion(rankings: Sequence[Ranking], k_constant: int = 60, depth: int = 200) -> Ranking:
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): ``score(d) = Σ_r 1 / (k_constant +
    rank_r(d))``.

    Ranks count from 1; a ranking that lacks ``d`` adds nothing. ``rankings`` are of the same queries and
    number the documents alike. ``depth`` ranks of each are read, and the result is (queries, depth), score
    descending, then row ascending. Sums are taken in float64 and compared as float32, so that equal sums tie
    in whatever order the rankings come.
    """
    widths = [min(depth, ranking.rows.shape[1]) for ranking in rankings]
    reciprocal_ranks = np.concatenate([1.0 / (k_constant + np.arange(1, width + 1)) for width in widths])
    fused = Ranking.empty(len(rankings[0].rows), depth)
    for block in query_blocks(len(fused.rows), sum(widths)):
        candidates = np.concatenate([ranking.rows[block, :depth] for ranking in rankings], axis=1)
        rows, order, is_first = _by_row(candidates)
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        scores[is_first] = np.bincount(np.cumsum(is_first.ravel()) - 1, weights=reciprocal_ranks[order].ravel())
        scores[rows < 0] = -np.inf
        fused.put(block, best_candidates(scores, np.where(is_first, rows, -1), depth))
    return fused


def _by_row(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Each query's ``rows`` (queries, n) ascending, equal ones as they came; where they were; which is the first."""
    order = np.argsort(rows, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    is_first = np.ones(rows.shape, dtype=bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, order, is_first


def query_blocks(queries: int, width: int) -> Iterator[slice]:
    """Slices over ``queries`` lists of ``width`` candidates, so that sorting them takes bounded memory."""
    step = max(1, CANDIDATES_AT_ONCE // max(1, width))
    for start in range(0, queries, step):
        yield slice(start, start + step)
