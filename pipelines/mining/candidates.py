"""Mined candidates as an artifact: of each query some documents with scores, ranks and judgments, in parquet.

One row is one query, in the order of the run that was mined; the lists of a row are of one length. Row groups hold
some ten thousand candidates, so rows can be read in any order in little memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mining.rules import UNJUDGED, Positives
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import ParquetRows, StoredCollection

CANDIDATES = "candidates"
Form = Literal["hard_negatives", "labelled_lists"]

SCHEMA = pa.schema(
    [
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("query_row", pa.int64(), nullable=False),  # in the collection, as document_rows
        pa.field("document_ids", pa.list_(pa.string()), nullable=False),
        pa.field("document_rows", pa.list_(pa.int64()), nullable=False),
        pa.field("scores", pa.list_(pa.float32()), nullable=False),  # null: a positive without a known score
        pa.field("ranks", pa.list_(pa.int32()), nullable=False),  # in the run, from 1; null: not retrieved
        pa.field("relevance", pa.list_(pa.int32()), nullable=False),  # null: not judged
    ]
)

_CANDIDATES_OF_A_ROW_GROUP = 1 << 16


@dataclass(frozen=True)
class CandidateLists:
    """The lists of several queries end to end, each from ``offsets[i]`` to ``offsets[i + 1]``.

    ``rows`` int64; ``scores`` float32, NaN where unknown; ``ranks`` int32, 0 where not retrieved; ``relevance`` int32,
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
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


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
    group_size = max(1, _CANDIDATES_OF_A_ROW_GROUP // max(1, longest))
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

    def audit(self) -> dict[str, Any]:
        """What each rule dropped, with examples: ``audit.json``, as ``pipelines.mining.audit`` describes."""
        found: dict[str, Any] = self.read_json("audit.json")
        return found


# query rows (n,), and a list of document rows for each
NegativesOfQueries = tuple[NDArray[np.int64], pa.ListArray]


def mined_lists(candidates: StoredCandidates) -> Iterator[NegativesOfQueries]:
    """Of each query its candidates that are no positives, in their order."""
    for table in candidates.tables(["query_row", "document_rows", "relevance"]):
        lists = table["document_rows"].combine_chunks()
        owners, rows = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists).to_numpy()
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
    queries = collection.require("queries", judgments["query_id"])
    documents = collection.find("documents", judgments["document_id"])
    order = np.argsort(queries, kind="stable")
    distinct, owners = np.unique(queries[order], return_inverse=True)
    yield distinct, _as_lists(owners, documents[order], len(distinct))


def lists_in_turn(one: Iterable[NegativesOfQueries], other: Iterable[NegativesOfQueries]) -> NegativesOfQueries:
    """Of each query the documents of both lists in turn, each once; what is left of the longer list comes last.

    So the first 100 are 50 of each where both have as many. In memory are all lists.
    """
    found: dict[int, list[list[int]]] = {}
    for place, lists in enumerate((one, other)):
        for queries, documents in lists:
            for query, rows in zip(queries.tolist(), documents.to_pylist(), strict=True):
                found.setdefault(query, [[], []])[place] += rows
    joined = [
        list(dict.fromkeys(row for pair in zip_longest(*found[query]) for row in pair if row is not None))
        for query in sorted(found)
    ]
    return np.array(sorted(found), dtype=np.int64), pa.array(joined, pa.list_(pa.int64()))


def _as_lists(owners: NDArray[np.int64], rows: NDArray[np.int64], number: int) -> pa.ListArray:
    """``rows`` (n,) as ``number`` lists; ``owners`` (n,), ascending, are the lists' places."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=number))])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(rows))
