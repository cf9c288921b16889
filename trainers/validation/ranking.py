"""Documents ranked block by block as their vectors come, and the rankings of all ranks made one."""

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.retrieval.rerank import rerank
from raytriever.retrieval.top_k import Ranking, best_of_documents, exact_top_k, merge_rankings, query_blocks
from raytriever.trainers import collectives
from raytriever.trainers.validation.texts import Vectors


def nothing_found(queries: int, k: int) -> Ranking:
    """A ranking without documents."""
    return Ranking(np.full((queries, k), -1, dtype=np.int64), np.full((queries, k), -np.inf, dtype=np.float32))


def search_block(queries: Vectors, rows: NDArray[np.int64], vectors: Vectors, k: int, device: torch.device) -> Ranking:
    """The ``k`` best of a block of documents for each query, exactly, by inner product with its best vector.

    ``queries`` (queries, d); ``vectors`` (n, d) or (n, m, d) of the documents in ``rows``, which ascend.
    """
    per_document = vectors.shape[1] if vectors.ndim == 3 else 1
    flat = vectors.reshape(-1, queries.shape[1])
    found = nothing_found(len(queries), k)
    wanted = k * per_document
    for block in query_blocks(len(queries), wanted):
        best = exact_top_k(queries[block], flat, wanted, device=str(device))
        if per_document > 1:
            best = best_of_documents(best, per_document, k)
        found.rows[block] = np.where(best.rows < 0, -1, rows[best.rows])
        found.scores[block] = best.scores
    return found


def rerank_block(
    queries: Vectors, rows: NDArray[np.int64], vectors: Vectors, candidates: NDArray[np.int64], k: int
) -> Ranking:
    """The same of those documents of the block that are candidates of the query: rows (queries, n), -1 for none."""
    place = np.minimum(np.searchsorted(rows, candidates), len(rows) - 1)
    place = np.where(rows[place] == candidates, place, -1)
    asked = np.flatnonzero((place >= 0).any(axis=1))
    here = Ranking(place[asked], np.zeros(place[asked].shape, dtype=np.float32))
    best = rerank(here, queries[asked].astype(np.float32), lambda wanted: vectors[wanted].astype(np.float32), k)
    found = nothing_found(len(queries), k)
    found.rows[asked] = np.where(best.rows < 0, -1, rows[best.rows])
    found.scores[asked] = best.scores
    return found


def merge_over_ranks(own: Ranking, device: torch.device) -> Ranking:
    """The best of all ranks' rankings, on every rank; some queries at a time cross them."""
    ranks, (queries, k) = collectives.world_size(), own.rows.shape
    if ranks == 1:
        return own
    merged = nothing_found(queries, k)
    for block in query_blocks(queries, ranks * k):
        rows, scores = (
            collectives.gather(torch.from_numpy(part[block]).to(device)).cpu().numpy().reshape(ranks, -1, k)
            for part in (own.rows, own.scores)
        )
        best = merge_rankings([Ranking(*of_rank) for of_rank in zip(rows, scores, strict=True)], k)
        merged.rows[block], merged.scores[block] = best.rows, best.scores
    return merged
