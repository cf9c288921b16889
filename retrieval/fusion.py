"""Fusion of several rankings of the same queries into one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.top_k import Ranking, best_candidates, query_blocks


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
        fused.put(block, _sum_by_row(candidates, reciprocal_ranks, depth))
    return fused


def _sum_by_row(rows: NDArray[np.int64], weights: NDArray[np.float64], k: int) -> Ranking:
    """Adds the ``weights`` (columns,) of equal entries of each line of ``rows`` (queries, columns); the k
    largest sums."""
    order = np.argsort(rows, axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    is_first = np.ones(rows.shape, dtype=bool)
    is_first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    group = np.cumsum(is_first.ravel()) - 1
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    scores[is_first] = np.bincount(group, weights=weights[order].ravel())
    scores[rows < 0] = -np.inf
    return best_candidates(scores, np.where(is_first, rows, -1), k)
