"""Re-ranking: the candidates of a first stage, scored by an encoder's vectors: exactly, or by a module over lists."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes.top_k import Ranking, best_candidates

if TYPE_CHECKING:
    from retrieval.encoders.list_scorer import ListScorer

_BYTES_AT_ONCE = 256 << 20


def rerank(
    candidates: Ranking,
    queries: NDArray[np.float32],
    documents: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    k: int,
) -> Ranking:
    """The ``k`` best of each query's candidates by inner product with its vector, in the defined order.

    ``candidates`` (queries, n): their scores are not read. ``queries`` (queries, d). ``documents`` gives the vectors of
    rows: (rows, d), or (rows, m, d), where the best of m counts. It is asked once for each distinct row of a block of
    queries, in ascending order. Memory holds the result and one block, or one query's candidates if these are more.
    """
    ranking = Ranking.empty(len(candidates.rows), k)
    end, per_block = 0, 1  # the first query's candidates show how many vectors a document has
    while end < len(candidates.rows):
        start, end = end, end + per_block
        block = slice(start, end)
        distinct, place = np.unique(candidates.rows[block], return_inverse=True)
        place = place.reshape(candidates.rows[block].shape)
        absent = int((distinct < 0).sum())  # -1 sorts first: its place is that of no vector
        if absent == len(distinct):
            continue
        vectors = documents(distinct[absent:]).reshape(len(distinct) - absent, -1, queries.shape[1])
        per_block = max(1, _BYTES_AT_ONCE // max(1, 4 * candidates.rows.shape[1] * vectors[0].size))
        for query, (found, of_query) in enumerate(zip(candidates.rows[block], place, strict=True), start):
            chosen = found >= 0
            # summed in float64: the float32 score is then the same wherever a vector stands among the candidates
            products = vectors[of_query[chosen] - absent] @ queries[query].astype(np.float64)
            best = np.full((1, len(found)), -np.inf, dtype=np.float32)
            best[0, chosen] = products.max(axis=1)
            ranking.put(slice(query, query + 1), best_candidates(best, found[None], k))
    return ranking


def rerank_lists(
    candidates: Ranking,
    queries: NDArray[np.float32],
    documents: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    scorer: "ListScorer",
    k: int,
) -> Ranking:
    """The ``k`` best of each query's candidates by a module that reads the whole list, in the defined order.

    ``candidates`` (queries, n), ``queries`` (queries, d) and ``documents`` are as in ``rerank``, with one vector a
    document. Lists are scored on the module's device in float64. So the float32 score doesn't depend on a candidate's
    place, nor on other lists in the batch. Memory holds the result and a few lists. Raises ``UserError`` where scores
    aren't finite.
    """
    import torch

    scorer = copy.deepcopy(scorer).double().eval()
    device = scorer.out.device
    ranking = Ranking.empty(len(candidates.rows), k)
    per_block = max(1, _BYTES_AT_ONCE // max(1, scorer.bytes_of_list(candidates.rows.shape[1])))
    for start in range(0, len(candidates.rows), per_block):
        found = candidates.rows[start : start + per_block]
        distinct, place = np.unique(found, return_inverse=True)
        absent = int((distinct < 0).sum())  # -1 sorts first, and is put behind all vectors
        if absent == len(distinct):
            continue
        vectors = documents(distinct[absent:])
        places = np.where(found < 0, len(vectors), place.reshape(found.shape) - absent)
        with torch.no_grad():
            scored = scorer(
                torch.from_numpy(queries[start : start + per_block]).to(device, torch.float64),
                torch.nn.functional.pad(torch.from_numpy(vectors).to(device), (0, 0, 0, 1)),
                torch.from_numpy(places).to(device),
            )
        if not scored.isfinite().all():
            raise UserError(
                "The scoring module gives scores that are not finite numbers, so nothing can be ranked by it."
                " Train it again with a lower optimizer.learning_rate."
            )
        best = np.where(found < 0, -np.inf, scored.cpu().numpy()).astype(np.float32)
        ranking.put(slice(start, start + per_block), best_candidates(best, found, k))
    return ranking
