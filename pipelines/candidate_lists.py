"""Mined or judged candidates as batches want them: hard negatives by query, lists that are whole."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.long_columns import places_among
from raytriever.retrieval.mining.candidates import StoredCandidates

# query rows (n,), and a list of document rows for each
NegativesOfQueries = tuple[NDArray[np.int64], pa.ListArray]


def mined_lists(candidates: StoredCandidates) -> Iterator[NegativesOfQueries]:
    """Of each query its candidates that are no positives, in their order.

    Raises ``UserError`` where a list has a document twice.
    """
    for table in candidates.tables(["query_id", "query_row", "document_rows", "relevance"]):
        lists = table["document_rows"].combine_chunks()
        owners, rows = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists).to_numpy()
        _refuse_repeats(candidates, table["query_id"], owners, rows)
        relevance = pc.list_flatten(table["relevance"].combine_chunks())
        negative = pc.less(relevance, candidates.minimum_relevance).fill_null(True).to_numpy(zero_copy_only=False)
        yield table["query_row"].to_numpy(), _as_lists(owners[negative], rows[negative], len(table))


def judged_lists(collection: StoredCollection, split: str) -> Iterator[NegativesOfQueries]:
    """Of each query the documents that the split judges as not relevant (0 or less), in the order of the judgments."""
    judgments = collection.judgments(split)
    judgments = judgments.filter(pc.less_equal(judgments["relevance"], 0))
    if not len(judgments):
        raise UserError(
            f"Split '{split}' of {collection.uri} judges no document with a relevance of 0 or less, so it has no hard"
            " negatives. Mine some from a run and name them as 'negatives'."
        )
    queries = collection.query_rows(judgments["query_id"])
    documents = places_among(judgments["document_id"], collection.rows_of("documents").read(["id"])["id"])
    order = np.argsort(queries, kind="stable")
    distinct, owners = np.unique(queries[order], return_inverse=True)
    yield distinct, _as_lists(owners, documents[order], len(distinct))


def _as_lists(owners: NDArray[np.int64], rows: NDArray[np.int64], number: int) -> pa.ListArray:
    """``rows`` (n,) as ``number`` lists; ``owners`` (n,), ascending, are the lists' places."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=number))])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(rows))


def check_labelled(table: pa.Table, candidates: StoredCandidates) -> None:
    """Raises ``UserError`` naming a query whose list has no relevant document, or has one document twice.

    ``table``: some rows of ``candidates``.
    """
    lists = table["document_rows"].combine_chunks()
    owners = pc.list_parent_indices(lists).to_numpy()
    relevance = pc.list_flatten(table["relevance"].combine_chunks()).fill_null(0).to_numpy()
    positives = np.bincount(owners[relevance >= candidates.minimum_relevance], minlength=len(table))
    if not positives.all():
        query = table["query_id"][int(np.argmin(positives))].as_py()
        raise UserError(
            f"{candidates.uri} lists no document of relevance {candidates.minimum_relevance} or more for query"
            f" {query!r}. Mine the candidates again."
        )
    _refuse_repeats(candidates, table["query_id"], owners, pc.list_flatten(lists).to_numpy())


def _refuse_repeats(
    candidates: StoredCandidates, query_ids: pa.ChunkedArray, owners: NDArray[np.int64], rows: NDArray[np.int64]
) -> None:
    order = np.lexsort((rows, owners))
    again = (np.diff(owners[order]) == 0) & (np.diff(rows[order]) == 0)
    if again.any():
        query = query_ids[int(owners[order][int(np.argmax(again))])].as_py()
        raise UserError(f"{candidates.uri} lists a document twice for query {query!r}. Mine the candidates again.")
