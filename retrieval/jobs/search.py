"""`raytriever search`: the queries of a split against an index; writes a TREC run."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.encoders.specification import EncoderContract
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.index import INDEX, index_ids, lexical_folder
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lexical import LexicalIndex
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.runs import RUN, write_stored_run
from raytriever.retrieval.top_k import Ranking, merge_rankings
from raytriever.retrieval.vector_index import read_index, search_shard, set_search_parameters, set_threads
from raytriever.retrieval.vectors import StoredVectors


class SearchConfig(StageConfig):
    """Which queries (the judged ones of a split) are searched where; ``vectors`` hold them for a vector index."""

    index: InputPath
    collection: InputPath
    vectors: InputPath | None = None
    split: str = "test"
    top_k: int = Field(default=100, gt=0)
    search_parameters: str = ""  # as FAISS writes them: nprobe=64, efSearch=128
    tag: str = "raytriever"


class Search(Stage[SearchConfig]):
    """Fans out to the index's shards, then merges: score descending, then row."""

    command = "search"
    kind = RUN
    config_class = SearchConfig
    unit = "queries"

    def plan(self) -> list[Shard]:
        """A partial result for each index shard, then the merge; refuses vectors of another encoder."""
        index = Artifact(self.config.index, INDEX)
        collection = StoredCollection(self.config.collection)
        require_same_origin("collection", collection, index)
        collection.judgments(self.config.split)
        if index.config["index"]["kind"] == "lexical":
            if self.config.vectors:
                raise UserError(f"{index.uri} is a BM25 index and takes texts; leave 'vectors' out.")
        else:
            if not self.config.vectors:
                raise UserError(f"{index.uri} is an index of vectors: name the 'vectors' artifact with the queries.")
            queries = StoredVectors(self.config.vectors)
            require_same_origin("collection", collection, queries)
            contract = EncoderContract.model_validate(index.manifest["facts"]["encoder"])
            contract.require_same(queries.contract, index.uri, queries.uri)
        partial = [
            Shard(f"partial-{record.name}", {"shard": number}, phase=0, intermediate=True)
            for number, record in enumerate(index.shards)
        ]
        return [*partial, Shard("run", phase=1)]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One index shard's best, or the merge of all."""
        index = Artifact(self.config.index, INDEX)
        collection = StoredCollection(self.config.collection)
        if shard.name != "run":
            ranking = self._search(index, shard.description["shard"], collection, writer)
            for array, values in (("rows", ranking.rows), ("scores", ranking.scores)):
                np.save(writer.path(f"{shard.name}/{array}.npy"), values)
                writer.add(f"{shard.name}/{array}.npy")
            return writer.commit(0)
        partial = [
            Ranking(*(np.load(io.BytesIO(writer.read(f"partial-{record.name}/{a}.npy"))) for a in ("rows", "scores")))
            for record in index.shards
        ]
        ranking = merge_rankings(partial, self.config.top_k)
        query_ids, _ = judged_queries(collection, self.config.split)
        return write_stored_run(writer, query_ids, index_ids(index), ranking, self.config.tag)

    def _search(self, index: Artifact, number: int, collection: StoredCollection, writer: ShardWriter) -> Ranking:
        _, rows = judged_queries(collection, self.config.split)
        if self.config.vectors is None:
            lexical = LexicalIndex.load(lexical_folder(index, writer.path("index").parent))
            return lexical.search(collection.texts("queries", rows), self.config.top_k)
        set_threads(max(1, int(self.config.resources.cpus)))
        record = index.shards[number]
        opened = read_index(index.path(f"shards/{record.name}.faiss"))
        if self.config.search_parameters:
            set_search_parameters(opened, self.config.search_parameters)
        queries = StoredVectors(self.config.vectors).part("queries").gather(rows)
        return search_shard(opened, queries, self.config.top_k, record.facts["first_row"])

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection whose row numbers the run uses."""
        return {"origins": {"collection": StoredCollection(self.config.collection).fingerprint}}

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The run file."""
        return ["run.trec"]


def judged_queries(collection: StoredCollection, split: str) -> tuple[list[str], NDArray[np.int64]]:
    """Ids and row numbers of the queries that the split judges, in row order."""
    ids = collection.rows_of("queries").read(["id"])["id"].combine_chunks()
    judged = collection.judgments(split)["query_id"].unique()
    rows = np.flatnonzero(pc.is_in(ids, value_set=judged).to_numpy(zero_copy_only=False)).astype(np.int64)
    return ids.take(pa.array(rows)).to_pylist(), rows
