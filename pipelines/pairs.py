"""Training pairs: a query and a document that answers it, by row number in their collection."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.errors import UserError

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


def pairs_from_judgments(
    judgments: pa.Table, query_ids: pa.Array, document_ids: pa.Array, domains: pa.Array, minimum_relevance: int
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
    table = pa.table(
        {
            "query_id": relevant["query_id"],
            "document_id": relevant["document_id"],
            "domain": pc.take(domains, document_rows),
            "query_row": query_rows,
            "document_row": document_rows,
        }
    )
    return table.sort_by([("query_row", "ascending"), ("document_row", "ascending")]).cast(SCHEMA)


def _rows_of(ids: pa.ChunkedArray, known: pa.Array, what: str) -> pa.Array:
    rows = pc.index_in(ids, value_set=known).combine_chunks()
    if rows.null_count:
        unknown = ids.combine_chunks().filter(pc.is_null(rows))
        raise UserError(
            f"{len(unknown)} judgments name a {what} that the collection lacks, the first {unknown[0].as_py()!r}."
        )
    return rows.cast(pa.int64())


def read_pairs(artifact: Artifact, columns: list[str]) -> pa.Table:
    """Columns of a pairs artifact, in pair order (a pair's number is its row here)."""
    return pa.concat_tables(pq.read_table(artifact.path(name), columns=columns) for name in artifact.names("pairs/"))
