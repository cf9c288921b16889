"""Runs as artifacts: the TREC file that every tool reads, and the same ranking as arrays for the next stage."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.run_files import write_run
from raytriever.retrieval.top_k import Ranking

RUN = "run"


def write_stored_run(
    writer: ShardWriter, query_ids: Sequence[str], document_ids: Sequence[str], ranking: Ranking, tag: str
) -> ShardRecord:
    """Writes ``run.trec``, the arrays, and the ids that their lines and row numbers mean."""
    write_run(writer.path("run.trec"), query_ids, document_ids, ranking, tag)
    np.save(writer.path("rows.npy"), ranking.rows)
    np.save(writer.path("scores.npy"), ranking.scores)
    pq.write_table(pa.table({"id": list(query_ids)}), writer.path("queries.parquet"), compression="zstd")
    pq.write_table(pa.table({"id": list(document_ids)}), writer.path("documents.parquet"), compression="zstd")
    for name in ("run.trec", "rows.npy", "scores.npy", "queries.parquet", "documents.parquet"):
        writer.add(name)
    return writer.commit(len(query_ids), counts={"results": int((ranking.rows >= 0).sum())})


class StoredRun(Artifact):
    """Opens a run artifact."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, RUN)

    def ranking(self) -> Ranking:
        """The ranking, its row numbers being those of the collection."""
        return Ranking(np.load(self.path("rows.npy")), np.load(self.path("scores.npy")))

    def query_ids(self) -> list[str]:
        """The query of each line."""
        ids: list[str] = pq.read_table(self.path("queries.parquet"))["id"].to_pylist()
        return ids

    def document_ids(self) -> list[str]:
        """The document of each row number."""
        ids: list[str] = pq.read_table(self.path("documents.parquet"))["id"].to_pylist()
        return ids
