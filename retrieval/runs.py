"""Runs as artifacts: the TREC file that every tool reads, and the same ranking as arrays for the next stage."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.run_files import write_run
from raytriever.retrieval.top_k import Ranking

RUN = "run"


def write_stored_run(
    writer: ShardWriter,
    query_ids: Sequence[str],
    document_ids: pa.StringArray,
    rankings: Iterable[Ranking],
    width: int,
    tag: str,
) -> ShardRecord:
    """Writes ``run.trec``, the arrays, and the ids that their lines and row numbers mean.

    ``rankings``: consecutive blocks of queries, each (n, ``width``); one of them is in memory at a time.
    """
    shape, start, results = (len(query_ids), width), 0, 0
    rows = np.lib.format.open_memmap(writer.path("rows.npy"), "w+", np.int64, shape)
    scores = np.lib.format.open_memmap(writer.path("scores.npy"), "w+", np.float32, shape)
    with writer.path("run.trec").open("w", encoding="utf-8", newline="\n") as file:
        for block in rankings:
            stop = start + len(block.rows)
            rows[start:stop], scores[start:stop] = block.rows, block.scores
            used = np.unique(block.rows[block.rows >= 0])
            names = dict(zip(used.tolist(), document_ids.take(pa.array(used)).to_pylist(), strict=True))
            write_run(file, query_ids[start:stop], names, block, tag)
            start, results = stop, results + int((block.rows >= 0).sum())
    for array in (rows, scores):
        array.flush()
    del rows, scores
    pq.write_table(pa.table({"id": list(query_ids)}), writer.path("queries.parquet"), compression="zstd")
    pq.write_table(pa.table({"id": document_ids}), writer.path("documents.parquet"), compression="zstd")
    for name in ("run.trec", "rows.npy", "scores.npy", "queries.parquet", "documents.parquet"):
        writer.add(name)
    return writer.commit(len(query_ids), counts={"results": results})


class StoredRun(Artifact):
    """Opens a run artifact."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, RUN)

    @property
    def system(self) -> dict[str, Any]:
        """What made the run: index, encoder, prompts, whether titles were used; flat, for people to read."""
        return dict(self.manifest["facts"].get("system", {}))

    def ranking(self) -> Ranking:
        """The ranking, memory-mapped, its row numbers being those of the collection."""
        rows, scores = (np.load(self.path(name), mmap_mode="r") for name in ("rows.npy", "scores.npy"))
        return Ranking(rows, scores)

    def query_ids(self) -> list[str]:
        """The query of each line."""
        ids: list[str] = pq.read_table(self.path("queries.parquet"))["id"].to_pylist()
        return ids

    def document_ids(self) -> pa.StringArray:
        """The document of each row number."""
        return pq.read_table(self.path("documents.parquet"))["id"].combine_chunks()
