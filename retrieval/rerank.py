"""Re-ranking: the candidates of a first stage, scored exactly by an encoder's vectors."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.top_k import Ranking, best_candidates

_BYTES_AT_ONCE = 256 << 20


def rerank(
    candidates: Ranking,
    queries: NDArray[np.float32],
    documents: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    k: int,
) -> Ranking:
    """The ``k`` best of each query's candidates by inner product with its vector, in the defined order.

    ``candidates`` (queries, n): their scores are not read. ``queries`` (queries, d). ``documents`` gives the vectors
    of rows, (rows, d) or (rows, m, d) where a document has m, of which the best counts; each distinct row of a block
    of queries is asked for once, in ascending order. Memory: that of the result and of one block.
    """
    rows = np.full((len(candidates.rows), k), -1, dtype=np.int64)
    scores = np.full((len(candidates.rows), k), -np.inf, dtype=np.float32)
    per_block = max(1, _BYTES_AT_ONCE // max(1, 4 * candidates.rows.shape[1] * queries.shape[1]))
    for start in range(0, len(candidates.rows), per_block):
        block = slice(start, start + per_block)
        distinct, place = np.unique(candidates.rows[block], return_inverse=True)
        place = place.reshape(candidates.rows[block].shape)
        absent = int((distinct < 0).sum())  # -1 sorts first: its place is that of no vector
        if absent == len(distinct):
            continue
        vectors = documents(distinct[absent:]).reshape(len(distinct) - absent, -1, queries.shape[1])
        for query, (found, of_query) in enumerate(zip(candidates.rows[block], place, strict=True), start):
            chosen = found >= 0
            # summed in float64: the float32 score is then the same wherever a vector stands among the candidates
            products = vectors[of_query[chosen] - absent].astype(np.float64) @ queries[query].astype(np.float64)
            best = np.full((1, len(found)), -np.inf, dtype=np.float32)
            best[0, chosen] = products.max(axis=1)
            ranked = best_candidates(best, found[None], k)
            rows[query], scores[query] = ranked.rows[0], ranked.scores[0]
    return Ranking(rows, scores)
