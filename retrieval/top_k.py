"""Exact inner-product search, and the one order that every ranking has.

**The order**: score descending, then row ascending. Rows number the documents of a collection in the order of
their ids, so equal scores are in id order, whatever the number of shards, workers or blocks. It holds at the
cut as well: of documents that tie for the last place, the ones with the lowest rows are in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError

# Queries and documents of one product: what fits a CPU's caches, and what keeps a GPU busy.
_CPU_BLOCKS = (64, 8192)
_GPU_BLOCKS = (1024, 65536)
_ABSENT = torch.iinfo(torch.int64).min
_LOW_BITS = 0xFFFFFFFF
_CANDIDATES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Ranking:
    """The best documents of each query, in the order of this module.

    ``rows``: (queries, k) int64, row numbers of documents, -1 where a query has fewer than k.
    ``scores``: (queries, k) float32, -inf where ``rows`` is -1.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]


def exact_top_k(
    queries: NDArray[Any], documents: NDArray[Any], k: int, *, first_row: int = 0, device: str = "cpu"
) -> Ranking:
    """The ``k`` documents with the largest inner product with each query, exactly and in the defined order.

    ``queries`` (queries, d) and ``documents`` (documents, d), float16 or float32, products in float32.
    ``documents`` may be memory-mapped: it is read once, block by block; memory is that of the queries, the
    result and one block. ``first_row``: the row number of ``documents[0]``. ``device``: where torch
    multiplies.

    Every product has one shape (a short block is filled up and cut after), because BLAS rounds differently for
    different shapes: so a pair's score does not depend on its neighbours, equal vectors have equal scores,
    and a search of shards, merged, equals the search of the whole.

    Raises ``UserError`` where k is below 1, shapes or dtypes don't fit, or a vector holds NaN or infinity.
    """
    check_vectors(queries, "queries")
    check_vectors(documents, "documents", dimension=queries.shape[1])
    _check_k(k)
    if len(documents) > _LOW_BITS:
        raise UserError(f"{len(documents)} documents are more than one search takes ({_LOW_BITS}). Search in shards.")
    check_finite(queries, "queries")
    query_block, document_block = _CPU_BLOCKS if torch.device(device).type == "cpu" else _GPU_BLOCKS
    padded = np.zeros((-(-len(queries) // query_block) * query_block, queries.shape[1]), dtype=np.float32)
    padded[: len(queries)] = queries
    left = torch.from_numpy(padded).to(device)
    best = torch.full((len(queries), k), _ABSENT, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    buffer = np.zeros((document_block, queries.shape[1]), dtype=np.float32)
    for start in range(0, len(documents), document_block):
        count = min(document_block, len(documents) - start)
        buffer[:count] = documents[start : start + count]
        right = torch.from_numpy(buffer).to(device).T
        rows = torch.arange(start, start + count, device=device)
        for place in range(0, len(queries), query_block):
            kept = best[place : place + query_block]
            scores = (left[place : place + query_block] @ right)[: len(kept), :count]
            finite &= torch.isfinite(scores).all()
            candidates = torch.cat([kept, _order_keys(scores, rows)], dim=1)
            kept.copy_(torch.topk(candidates, k, dim=1).values)
    if not finite:
        check_finite(documents, "documents")
        raise UserError("An inner product of queries and documents exceeds float32. Normalise the vectors.")
    return _ranking_of_keys(best, first_row)


def _order_keys(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Packs score and row into an int64; descending keys are the defined order, and no two keys tie."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal scores: make them equal bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats order as their bits do, negative ones reversed
    return (ordered.to(torch.int64) << 32) | (_LOW_BITS - rows)


def _ranking_of_keys(keys: torch.Tensor, first_row: int) -> Ranking:
    ordered = (keys >> 32).to(torch.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    absent = keys == _ABSENT
    rows = (_LOW_BITS - (keys & _LOW_BITS) + first_row).masked_fill(absent, -1)
    return Ranking(rows.cpu().numpy(), scores.masked_fill(absent, -torch.inf).cpu().numpy())


def merge_rankings(rankings: Sequence[Ranking], k: int) -> Ranking:
    """The ``k`` best documents of each query over the rankings of shards, in the defined order.

    Equals the ranking of one search over all rows, if each shard was searched for at least ``k``. Raises
    ``UserError`` where there is no ranking, k is below 1, or the numbers of queries differ.
    """
    _check_k(k)
    queries = check_same_queries(rankings)
    rows = np.full((queries, k), -1, dtype=np.int64)
    scores = np.full((queries, k), -np.inf, dtype=np.float32)
    for block in query_blocks(queries, sum(ranking.rows.shape[1] for ranking in rankings)):
        merged = best_candidates(
            np.concatenate([ranking.scores[block] for ranking in rankings], axis=1),
            np.concatenate([ranking.rows[block] for ranking in rankings], axis=1),
            k,
        )
        rows[block], scores[block] = merged.rows, merged.scores
    return Ranking(rows, scores)


def best_candidates(scores: NDArray[np.float32], rows: NDArray[np.int64], k: int) -> Ranking:
    """Orders candidates (queries, n), cut or padded to ``k``; row -1 with score -inf stands for none."""
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    padding = ((0, 0), (0, k - order.shape[1]))
    return Ranking(
        np.pad(np.take_along_axis(rows, order, axis=1), padding, constant_values=-1),
        np.pad(np.take_along_axis(scores, order, axis=1), padding, constant_values=-np.inf),
    )


def query_blocks(queries: int, width: int) -> Iterator[slice]:
    """Slices over ``queries`` lists of ``width`` candidates, so that sorting them takes bounded memory."""
    step = max(1, _CANDIDATES_AT_ONCE // max(1, width))
    for start in range(0, queries, step):
        yield slice(start, start + step)


def check_same_queries(rankings: Sequence[Ranking]) -> int:
    """The number of queries of all ``rankings``; raises ``UserError`` where there is none or it differs."""
    counts = sorted({len(ranking.rows) for ranking in rankings})
    if len(counts) != 1:
        raise UserError(f"{len(rankings)} rankings for {counts} queries were given; they must be of the same queries.")
    return counts[0]


def check_vectors(vectors: NDArray[Any], name: str, dimension: int | None = None) -> None:
    """Raises ``UserError`` where ``vectors`` is no (n, dimension) array of float16 or float32."""
    if vectors.ndim != 2 or vectors.dtype not in (np.float16, np.float32):
        raise UserError(
            f"{name}: shape {vectors.shape}, dtype {vectors.dtype}; a matrix of float16 or float32 is needed."
        )
    if dimension is not None and vectors.shape[1] != dimension:
        raise UserError(
            f"{name}: vectors of dimension {vectors.shape[1]}, {dimension} is needed. Were all embedded by"
            " the same encoder?"
        )


def check_finite(vectors: NDArray[Any], name: str, first_row: int = 0) -> None:
    """Raises ``UserError`` naming the first row, counted from ``first_row``, with NaN or infinity."""
    step = _CPU_BLOCKS[1]
    for start in range(0, len(vectors), step):
        finite = np.isfinite(vectors[start : start + step]).all(axis=1)
        if not finite.all():
            row = first_row + start + int(np.argmin(finite))
            raise UserError(f"Vector {row} of {name} holds NaN or infinity. Embed again; float16 may have overflowed.")


def _check_k(k: int) -> None:
    if k < 1:
        raise UserError(f"k is {k}; at least 1 document must be asked for.")
