"""Exact inner-product search: by torch, of anything on any device, and by FAISS, of stored vectors on the CPU.

Both give the order of ``top_k`` to the last document. A plain matrix product does not, because BLAS rounds a pair's
score differently with its place in the matrix and with the matrix's shape. So equal vectors would not tie, and merged
shards would not have the order of the whole.

``exact_top_k`` gives every product one shape. ``search_stored`` fetches a few more documents than asked for by FAISS's
blocked product. It scores each of them again by the same sum, whatever stands beside it. A bound on the product's error
proves that no other document belongs among the best. Some queries can't be proved: documents are close together at the
cut, or one is so long that the bound is wide. They are searched once more for four times as many documents. If that
fails too (many equal documents, say), all documents are scored so.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes.faiss_factory import import_faiss
from retrieval.indexes.top_k import (
    ABSENT,
    CANDIDATES_AT_ONCE,
    LOW_BITS,
    Ranking,
    best_candidates,
    ordered_bits,
)

if TYPE_CHECKING:
    import torch

# Queries and documents of one product; its scores stay in the cache until the best are picked from them.
_DOCUMENT_TILE = 1024
_TILES_AT_ONCE, _TILES_ON_GPU = 4, 64  # the best are picked together from their scores; the host waits each time
_QUERY_TILES = (64, 256, 1024)  # the smallest that holds all queries, else the largest
_DOCUMENT_BYTES_AT_ONCE = 64 << 20  # float32 documents that all queries meet before the next are read
_ROWS_CHECKED_AT_ONCE = 8192

_MARGIN = 8  # documents fetched beyond k, and a sixteenth of k more: these lie closer together
_WIDER = 4  # times as many are fetched for the queries that the first search doesn't prove
_QUERIES_AT_ONCE = 1024
_LONGEST = 1e18  # the product of two such lengths is far from float32's end


def order_keys(scores: "torch.Tensor", rows: "torch.Tensor") -> "torch.Tensor":
    """Packs score and row into an int64; descending keys are the defined order, and no two keys tie."""
    import torch

    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal scores: make them equal bits
    found: torch.Tensor = (ordered_bits(bits).to(torch.int64) << 32) | (LOW_BITS - rows)
    return found


def scores_of_keys(keys: "torch.Tensor") -> "torch.Tensor":
    """The float32 scores in keys, -inf of ``ABSENT``."""
    import torch

    scores: torch.Tensor = ordered_bits((keys >> 32).to(torch.int32)).view(torch.float32)
    return scores.masked_fill(keys == ABSENT, -np.inf)


def ranking_of_keys(keys: "torch.Tensor") -> Ranking:
    """Keys (queries, k) in descending order as a ranking."""
    rows = (LOW_BITS - (keys & LOW_BITS)).masked_fill(keys == ABSENT, -1)
    return Ranking(rows.cpu().numpy(), scores_of_keys(keys).cpu().numpy())


def exact_top_k(queries: NDArray[Any], documents: NDArray[Any], k: int, *, device: str = "cpu") -> Ranking:
    """The ``k`` documents with the largest inner product with each query, exactly and in the defined order.

    ``queries`` (queries, d) and ``documents`` (documents, d), float16 or float32, products in float32. ``documents``
    may be memory-mapped, because it is read once, block by block. Memory holds the queries, the result and one block.
    ``device``: where torch multiplies.

    Every product has one width (a short tile is filled up and cut after), because BLAS rounds differently for different
    shapes. So a pair's score does not depend on its neighbours, and equal vectors have equal scores. A merged search of
    shards equals the search of the whole.

    Raises ``UserError`` where a vector holds NaN or infinity, or a product might exceed float32.
    """
    import torch

    if len(documents) > LOW_BITS:
        raise UserError(f"{len(documents)} documents are more than one search takes ({LOW_BITS}). Search in shards.")
    dimension = queries.shape[1]
    tile = next((size for size in _QUERY_TILES if size >= len(queries)), _QUERY_TILES[-1])
    left = _whole_tiles(queries, tile, device)
    best = torch.full((len(left), k), ABSENT, device=device)
    tiles = _TILES_AT_ONCE if device == "cpu" else _TILES_ON_GPU
    scores = torch.empty((tile, tiles * _DOCUMENT_TILE), device=device)
    _longest(queries, "queries", there=left)
    width = scores.shape[1]
    rows_at_once = max(1, _DOCUMENT_BYTES_AT_ONCE // (4 * width * max(1, dimension))) * width
    for start in range(0, len(documents), rows_at_once):
        block = documents[start : start + rows_at_once]
        right = _whole_tiles(block, _DOCUMENT_TILE, device)
        _longest(block, "documents", start, there=right)
        for place in range(0, len(left), tile):
            for first in range(0, len(block), width):
                for offset in range(0, min(width, len(right) - first), _DOCUMENT_TILE):
                    of_tile = right[first + offset : first + offset + _DOCUMENT_TILE]
                    scores[:, offset : offset + _DOCUMENT_TILE] = left[place : place + tile] @ of_tile.T
                found = scores[:, : len(block) - first]
                best[place : place + tile] = _with_better(best[place : place + tile], found, start + first)
    return ranking_of_keys(best[: len(queries)].sort(dim=1, descending=True).values)


def _with_better(best: "torch.Tensor", scores: "torch.Tensor", first_row: int) -> "torch.Tensor":
    """The largest keys, of ``best`` (queries, k) int64 and of ``scores`` (queries, documents), in any order.

    Most scores are below the k-th best so far, and one comparison drops them. Documents count from ``first_row``, above
    those of ``best``: so nothing equal to the k-th best has to be kept.
    """
    import torch

    k = best.shape[1]
    threshold = scores_of_keys(best.min(dim=1, keepdim=True).values)
    if first_row == 0 and k <= scores.shape[1]:  # their own k-th best
        lowest = torch.topk(scores, k, dim=1).values[:, -1:]
        threshold = torch.nextafter(lowest, torch.full_like(lowest, -torch.inf))
    query, document = (scores > threshold).nonzero(as_tuple=True)
    counts = torch.zeros_like(best[:, 0]).index_add_(0, query, torch.ones_like(query))  # a bincount is waited for
    place = torch.arange(len(query), device=best.device) - (counts.cumsum(0) - counts)[query]
    added = torch.full((len(best), int(counts.max())), ABSENT, device=best.device)
    added[query, place] = order_keys(scores[query, document], document + first_row)
    return torch.cat([best, added], dim=1).topk(k, dim=1, sorted=False).values


def _whole_tiles(vectors: NDArray[Any], tile: int, device: str) -> "torch.Tensor":
    """``vectors`` on ``device``, made float32 there and filled up with zeros to whole tiles; copied where need be."""
    import torch

    there = torch.from_numpy(np.require(vectors, requirements=["C", "W"])).to(device).float()
    return torch.nn.functional.pad(there, (0, 0, 0, -len(there) % tile)) if len(there) % tile else there


def search_stored(queries: NDArray[Any], documents: NDArray[np.float32], k: int) -> Ranking:
    """The ``k`` documents with the largest inner product with each query, in the order of ``top_k``.

    ``queries`` (queries, d) float16 or float32; ``documents`` (documents, d) float32 and contiguous, may be
    memory-mapped; rows count from 0. A pair's score is a function of its two vectors alone (on one kind of processor).
    Threads are FAISS's. Raises ``UserError`` where a vector holds NaN or infinity, or a product might exceed float32.
    """
    sought = np.ascontiguousarray(queries, dtype=np.float32)
    ranking = Ranking.empty(len(queries), k)
    longest = _longest(documents, "documents")
    _longest(sought, "queries")
    pending = np.arange(len(sought) if len(documents) else 0)
    for times in (1, _WIDER):
        fetch = min(times * (k + k // 16 + _MARGIN), len(documents))
        step = min(_QUERIES_AT_ONCE, max(1, CANDIDATES_AT_ONCE // max(1, fetch)))
        unproven = [pending[:0]]
        for start in range(0, len(pending), step):
            block = pending[start : start + step]
            found, is_proven = _search_block(sought[block], documents, k, fetch, longest)
            ranking.put(block, found)
            unproven.append(block[~is_proven])
        pending = np.concatenate(unproven)
    for query in pending[:, None]:
        ranking.put(query, _score_all(sought[query], documents, k))
    return ranking


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
    # twice the first-order bound on a float32 sum of d products, for the product and for the second sum
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


def _score_all(queries: NDArray[np.float32], documents: NDArray[np.float32], k: int) -> Ranking:
    rows = np.arange(len(documents), dtype=np.int64)[None]
    return best_candidates(pair_scores(queries, documents, rows), rows, k)


def _longest(vectors: NDArray[Any], name: str, first_row: int = 0, *, there: "torch.Tensor | None" = None) -> float:
    """The largest length; raises ``UserError`` where a vector is not finite or too long for a product.

    ``there``: the vectors on the device that finds it.
    """
    if there is None:
        squares: Any = np.einsum("ij,ij->i", vectors, vectors)
    else:
        import torch

        squares = torch.einsum("ij,ij->i", there, there)
    longest = float(squares.max()) ** 0.5 if len(squares) else 0.0
    if not longest <= _LONGEST:
        _require_finite(vectors, name, first_row)
        raise UserError(
            f"{name}: a vector is {longest:.3g} long, so a product may exceed float32. Normalise the vectors."
        )
    return longest


def _require_finite(vectors: NDArray[Any], name: str, first_row: int) -> None:
    """Raises ``UserError`` naming the first row, counted from ``first_row``, with NaN or infinity."""
    for start in range(0, len(vectors), _ROWS_CHECKED_AT_ONCE):
        finite = np.isfinite(vectors[start : start + _ROWS_CHECKED_AT_ONCE]).all(axis=1)
        if not finite.all():
            row = first_row + start + int(np.argmin(finite))
            raise UserError(f"Vector {row} of {name} holds NaN or infinity. Embed again; float16 may have overflowed.")
