"""Mined candidates as an artifact: of each query some documents with scores, ranks and judgments, in parquet.

One row is one query, in the order of the run that was mined; the lists of a row are of one length. Row groups hold
some ten thousand candidates, so rows can be read in any order in little memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mining.rules import UNJUDGED, Positives
from raytriever.artifacts.artifact import Artifact
from retrieval.collections.collection import ParquetRows, schema_of

CANDIDATES = "candidates"
Form = Literal["hard_negatives", "labelled_lists"]

SCHEMA = schema_of(
    query_id=pa.string(),
    query_row=pa.int64(),  # in the collection, as document_rows
    document_ids=pa.list_(pa.string()),
    document_rows=pa.list_(pa.int64()),
    scores=pa.list_(pa.float32()),  # null: a positive without a known score
    ranks=pa.list_(pa.int32()),  # in the run, from 1; null: not retrieved
    relevance=pa.list_(pa.int32()),  # null: not judged
)

_CANDIDATES_OF_A_ROW_GROUP = 1 << 16


@dataclass(frozen=True)
class CandidateLists:
    """The lists of several queries end to end, each from ``offsets[i]`` to ``offsets[i + 1]``.

    ``rows`` int64. ``scores`` float32, NaN where unknown. ``ranks`` int32, 0 where not retrieved. ``relevance`` int32,
    ``UNJUDGED`` where not judged.
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    scores: NDArray[np.float32]
    ranks: NDArray[np.int32]
    relevance: NDArray[np.int32]


def negative_lists(
    chosen: NDArray[np.bool_], rows: NDArray[np.int64], scores: NDArray[np.float32], relevance: NDArray[np.int32]
) -> CandidateLists:
    """The chosen ones of candidates (queries, k), best first."""
    lengths = chosen.sum(axis=1)
    ranks = (np.nonzero(chosen)[1] + 1).astype(np.int32)
    return CandidateLists(_offsets(lengths), rows[chosen], scores[chosen], ranks, relevance[chosen])


def labelled_lists(negatives: CandidateLists, positives: Positives) -> CandidateLists:
    """The lists with every positive of the query before the others, most relevant first."""
    queries = len(negatives.offsets) - 1
    owners = np.concatenate([np.repeat(np.arange(queries), np.diff(negatives.offsets)), positives.pairs.queries])
    rows = np.concatenate([negatives.rows, positives.pairs.rows])
    ranks = np.concatenate([negatives.ranks, positives.ranks])
    relevance = np.concatenate([negatives.relevance, positives.pairs.relevance])
    scores = np.concatenate([negatives.scores, positives.scores])
    is_negative = np.arange(len(rows)) < len(negatives.rows)
    within = np.where(is_negative, ranks, -relevance.astype(np.int64))
    order = np.lexsort((within, is_negative, owners))  # stable: equally relevant ones stay in row order
    lengths = np.bincount(owners, minlength=queries)
    return CandidateLists(_offsets(lengths), rows[order], scores[order], ranks[order], relevance[order])


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.append(0, np.cumsum(lengths))


def write_lists(
    path: Path, query_ids: Sequence[str], query_rows: NDArray[np.int64], lists: CandidateLists, documents: ParquetRows
) -> None:
    """Writes one parquet file of ``SCHEMA``; ``documents`` are those of the collection."""
    distinct, place = np.unique(lists.rows, return_inverse=True)
    ids = documents.take(distinct, ["id"])["id"].combine_chunks().take(pa.array(place))
    columns = [
        ids,
        pa.array(lists.rows),
        pa.array(lists.scores, mask=np.isnan(lists.scores)),
        pa.array(lists.ranks, mask=lists.ranks == 0),
        pa.array(lists.relevance, mask=lists.relevance == UNJUDGED),
    ]
    offsets = pa.array(lists.offsets.astype(np.int32))
    arrays = [pa.array(list(query_ids), pa.string()), pa.array(query_rows)]
    arrays += [pa.ListArray.from_arrays(offsets, column) for column in columns]
    longest = int(np.diff(lists.offsets).max(initial=1))
    group_size = max(1, _CANDIDATES_OF_A_ROW_GROUP // longest)
    pq.write_table(pa.table(arrays, schema=SCHEMA), path, compression="zstd", row_group_size=group_size)


class StoredCandidates(Artifact):
    """Opens a candidates artifact; lists are read by row group, never all at once."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, CANDIDATES)
        self.form: Form = self.config["form"]
        self.minimum_relevance: int = self.config["rules"]["minimum_relevance"]
        self._rows = ParquetRows(self, self.names("candidates/"))

    def __len__(self) -> int:
        return len(self._rows)

    def tables(self, columns: Sequence[str] = SCHEMA.names) -> Iterator[pa.Table]:
        """Row group after row group, in order."""
        return self._rows.tables(columns)


# query rows and document rows (n,) of some pairs
Negatives = tuple[NDArray[np.int64], NDArray[np.int64]]


def mined_negatives(candidates: StoredCandidates) -> Iterator[Negatives]:
    """The candidates that are no positives, in their order."""
    for table in candidates.tables(["query_row", "document_rows", "relevance"]):
        lists = table["document_rows"].combine_chunks()
        relevance = pc.list_flatten(table["relevance"].combine_chunks())
        negative = pc.less(relevance, candidates.minimum_relevance).fill_null(True).to_numpy(zero_copy_only=False)
        query_rows = table["query_row"].to_numpy()[pc.list_parent_indices(lists).to_numpy()]
        yield query_rows[negative], pc.list_flatten(lists).to_numpy()[negative]
