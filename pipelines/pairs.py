"""Training pairs: a query and a document that answers it, by row number in their collection."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.long_columns import places_among, take_texts
from raytriever.retrieval.mining.rules import sampling_keys

PAIRS = "pairs"

SCHEMA = pa.schema(
    [
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("query_row", pa.int64(), nullable=False),
        pa.field("document_row", pa.int64(), nullable=False),
    ]
)


def judged_pairs(collection: StoredCollection, splits: Iterable[str], minimum_relevance: int) -> pa.Table:
    """``pairs_from_judgments`` of these splits of a collection. Raises ``UserError`` for a split that isn't there."""
    documents = collection.rows_of("documents").read(["id", "domain"])
    return pairs_from_judgments(
        pa.concat_tables(collection.judgments(split) for split in splits),
        collection.rows_of("queries").read(["id"])["id"],
        documents["id"],
        documents["domain"],
        minimum_relevance,
    )


def pairs_from_judgments(
    judgments: pa.Table,
    query_ids: pa.ChunkedArray,
    document_ids: pa.ChunkedArray,
    domains: pa.ChunkedArray,
    minimum_relevance: int,
) -> pa.Table:
    """One pair for every judgment of at least ``minimum_relevance``, in (query row, document row) order.

    ``judgments``: columns query_id, document_id, relevance. ``query_ids``, ``document_ids``: the collection's ids in
    row order; ``domains``: the domain of each document. Raises ``UserError`` where no judgment is relevant enough or
    one names an unknown id.
    """
    relevant = judgments.filter(pc.greater_equal(judgments["relevance"], minimum_relevance))
    if not len(relevant):
        raise UserError(
            f"No judgment has a relevance of {minimum_relevance} or more, so there are no pairs. Lower"
            " minimum_relevance or choose another split."
        )
    query_rows = _rows_of(relevant["query_id"], query_ids, "query")
    document_rows = _rows_of(relevant["document_id"], document_ids, "document")
    order = np.lexsort((document_rows, query_rows))
    columns = [
        take_texts(relevant["query_id"], order),
        take_texts(relevant["document_id"], order),
        take_texts(domains, document_rows[order]),
        query_rows[order],
        document_rows[order],
    ]
    return pa.table(columns, schema=SCHEMA)


def _rows_of(ids: pa.ChunkedArray, known: pa.ChunkedArray, what: str) -> NDArray[np.int64]:
    rows = places_among(ids, known)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown):
        raise UserError(
            f"{len(unknown)} judgments name a {what} that the collection lacks, the first"
            f" {ids[int(unknown[0])].as_py()!r}."
        )
    return rows


def some_of_each_query(pairs: pa.Table, number: int) -> NDArray[np.bool_]:
    """Whether a pair is one of at most ``number`` of its query, drawn by a hash of both ids; (pairs,)."""
    query_rows = pairs["query_row"].to_numpy()
    _, query, counts = np.unique(query_rows, return_inverse=True, return_counts=True)
    chosen = counts[query] <= number
    crowded = np.flatnonzero(~chosen)
    ids = zip(*(take_texts(pairs[name], crowded).to_pylist() for name in ("query_id", "document_id")), strict=True)
    keys = sampling_keys(0, ("\0".join(pair) for pair in ids))
    order = np.lexsort((keys, query[crowded]))
    first = np.searchsorted(query[crowded[order]], query[crowded[order]])
    chosen[crowded[order[np.arange(len(order)) - first < number]]] = True
    return chosen


def read_pairs(artifact: Artifact, columns: list[str]) -> pa.Table:
    """Columns of a pairs artifact, in pair order (a pair's number is its row here)."""
    return pa.concat_tables(pq.read_table(artifact.path(name), columns=columns) for name in artifact.names("pairs/"))
