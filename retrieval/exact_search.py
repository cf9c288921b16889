"""Exact search of stored vectors on the CPU: FAISS's blocked product finds candidates, one sum per pair scores them.

A matrix product rounds a pair's score differently with its place in the matrix, so equal vectors would not tie, and
shards, merged, would not be in the order of the whole. So a few more documents than asked for are fetched, and every
one of them is scored anew by the same sum whatever stands beside it. A bound on what the product may be off by proves
that no document left unfetched belongs among the best. The queries for which it can't (documents close together at the
cut, or one so long that the bound is wide) are searched once more for four times as many; those for which it still
can't (many equal documents, say) have all documents scored so.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.index_factory import import_faiss
from raytriever.retrieval.top_k import Ranking, best_candidates, check_finite, check_k, check_vectors

_MARGIN = 8  # documents fetched beyond k, and a sixteenth of k more: these lie closer together
_WIDER = 4  # times as many are fetched for the queries that the first search doesn't prove
_QUERIES_AT_ONCE = 1024
_CANDIDATES_AT_ONCE = 1 << 22  # of all queries of a block; scoring them takes some 40 bytes each
_LONGEST = 1e18  # the product of two such lengths is far from float32's end


def search_stored(queries: NDArray[Any], documents: NDArray[np.float32], k: int) -> Ranking:
    """The ``k`` documents with the largest inner product with each query, in the order of ``top_k``.

    ``queries`` (queries, d) float16 or float32; ``documents`` (documents, d) float32 and contiguous, may be
    memory-mapped; rows count from 0. A pair's score is a function of its two vectors alone (on one kind of processor).
    Threads are FAISS's. Raises ``UserError`` where k is below 1, dimensions differ, a vector holds NaN or infinity, or
    a product might exceed float32.
    """
    check_vectors(queries, "queries", dimension=documents.shape[1])
    check_k(k)
    sought = np.ascontiguousarray(queries, dtype=np.float32)
    rows = np.full((len(queries), k), -1, dtype=np.int64)
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    longest = _longest(documents, "documents")
    _longest(sought, "queries")
    pending = np.arange(len(sought) if len(documents) else 0)
    for times in (1, _WIDER):
        fetch = min(times * (k + k // 16 + _MARGIN), len(documents))
        step = min(_QUERIES_AT_ONCE, max(1, _CANDIDATES_AT_ONCE // max(1, fetch)))
        unproven = [pending[:0]]
        for start in range(0, len(pending), step):
            block = pending[start : start + step]
            found, is_proven = _search_block(sought[block], documents, k, fetch, longest)
            rows[block], scores[block] = found.rows, found.scores
            unproven.append(block[~is_proven])
        pending = np.concatenate(unproven)
    for query in pending.tolist():
        best = _score_all(sought[query], documents, k)
        rows[query], scores[query] = best.rows[0], best.scores[0]
    return Ranking(rows, scores)


def _search_block(
    queries: NDArray[np.float32], documents: NDArray[np.float32], k: int, fetch: int, longest: float
) -> tuple[Ranking, NDArray[np.bool_]]:
    """The best ``k`` among the ``fetch`` best by product, and whether they must be the best of all."""
    faiss = import_faiss()
    products, rows = faiss.knn(queries, documents, fetch, metric=faiss.METRIC_INNER_PRODUCT)
    exact = pair_scores(queries, documents, rows)
    best = best_candidates(exact, rows, k)
    if fetch == len(documents):
        return best, np.ones(len(queries), dtype=bool)
    # twice the first-order bound on a float32 sum of d products, for the product and for the sum anew
    lengths = np.sqrt(np.einsum("ij,ij->i", queries, queries, dtype=np.float64))
    rounding = 4 * (queries.shape[1] + 8) * 2.0**-24 * lengths * longest
    return best, best.scores[:, -1] > products[:, -1] + rounding


def pair_scores(
    queries: NDArray[np.float32], documents: NDArray[np.float32], rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Inner products of query i with the documents ``rows[i]``, float32 (queries, n), each one sum of its own."""
    faiss = import_faiss()
    keys = (rows.ravel() << 32) | np.arange(rows.size)
    keys.sort()  # by document, so that memory is read forwards and each document once
    places, of_documents = keys & 0xFFFFFFFF, keys >> 32
    of_queries = places // rows.shape[1]
    ordered = np.empty(rows.size, dtype=np.float32)
    pointers = [faiss.swig_ptr(array) for array in (queries, of_queries, documents, of_documents, ordered)]
    faiss.pairwise_indexed_inner_product(queries.shape[1], rows.size, *pointers)
    scores = np.empty(rows.size, dtype=np.float32)
    scores[places] = ordered
    return scores.reshape(rows.shape)


def _score_all(query: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
    rows = np.arange(len(documents), dtype=np.int64)[None]
    return best_candidates(pair_scores(query[None], documents, rows), rows, k)


def _longest(vectors: NDArray[np.float32], name: str) -> float:
    """The largest length; raises ``UserError`` where a vector is not finite or too long for a product."""
    faiss = import_faiss()
    squares = np.empty(len(vectors), dtype=np.float32)
    faiss.fvec_norms_L2sqr(faiss.swig_ptr(squares), faiss.swig_ptr(vectors), vectors.shape[1], len(vectors))
    longest = float(np.sqrt(squares.max(initial=0.0)))
    if not longest <= _LONGEST:
        check_finite(vectors, name)
        raise UserError(f"{name}: a vector is {longest:.3g} long, so a product may exceed float32. Normalise them.")
    return longest
