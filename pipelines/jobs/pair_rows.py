"""The query row and the document row of every pair as arrays, which all shards of a stage map instead of reading."""

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.jobs.lookups import map_array
from raytriever.retrieval.artifacts import Artifact, ShardWriter
from raytriever.retrieval.collections.stored import ParquetRows

_FILES = ("lookup/query-rows.npy", "lookup/document-rows.npy")


def write_pair_rows(writer: ShardWriter, pairs: Artifact) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query rows and document rows int64 (pairs,), written through memory maps and added to the shard."""
    rows = ParquetRows(pairs, pairs.names("pairs/"))
    queries, documents = (
        np.lib.format.open_memmap(writer.path(name), mode="w+", dtype=np.int64, shape=(len(rows),)) for name in _FILES
    )
    start = 0
    for table in rows.tables(["query_row", "document_row"]):
        queries[start : start + len(table)] = table["query_row"].to_numpy()
        documents[start : start + len(table)] = table["document_row"].to_numpy()
        start += len(table)
    for name, array in zip(_FILES, (queries, documents), strict=True):
        array.flush()
        writer.add(name)
    return queries, documents


def map_pair_rows(output: str, shard: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What ``write_pair_rows`` added to that shard of an earlier phase."""
    queries, documents = (map_array(output, shard, name) for name in _FILES)
    return queries, documents
