"""`raytriever search`: the queries of a split against an index; writes a TREC run."""

from collections.abc import Set
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BeforeValidator, PositiveInt

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.artifacts.long_columns import joined, take_texts
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages, made_by
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.specification import EncoderContract
from retrieval.indexes.faiss_factory import index_of_any_dimension, require_gpu_form
from retrieval.indexes.top_k import Ranking, merge_rankings
from retrieval.jobs.index import INDEX, VectorIndexSettings, id_blocks
from retrieval.lexical import LexicalIndex
from retrieval.rankings import (
    RANKING,
    Tag,
    join_ranking_blocks,
    read_ranking,
    require_names,
    write_ranking,
    write_ranking_block,
)
from retrieval.vectors import StoredVectors


class SearchConfig(StageConfig):
    """The queries and the index."""

    index: InputPath
    """An index of vectors or of words."""
    collection: InputPath
    """The collection of the indexed documents and of the queries."""
    queries: InputPath | None = None
    """Another collection to take the queries from."""
    vectors: InputPath | None = None
    """The queries' vectors, for an index of vectors."""
    split: str | None = "test"
    """Search only the queries judged in this split. null: every query."""
    domain: str | None = None
    """Search only queries of this domain. null: any."""
    top_k: PositiveInt = 100
    """Results for each query."""
    search_parameters: Annotated[str, BeforeValidator(lambda given: "" if given is None else given)] = ""
    """FAISS search parameters, such as nprobe=64 or efSearch=128. null: none."""
    queries_per_shard: PositiveInt = 8192
    """Queries searched in one task."""
    tag: Tag = "raytriever"
    """Name of the system in the TREC file."""


class Partial(NamedTuple):
    """A block of queries, by number, in a shard of the index."""

    block: int
    shard: int


class Search(Stage[SearchConfig]):
    """Fans out over blocks of queries and the index's shards, then merges: score descending, then row."""

    command = "search"
    kind = RANKING
    algorithm_version = 4
    config_class = SearchConfig
    unit = "queries"
    results = ("run.trec",)

    def check_settings(self, stages: Stages) -> None:
        """Parameters that an index of this recipe doesn't have, and one that no GPU can search, for a GPU."""
        settings = getattr(getattr(made_by(stages, self.config.index), "config", None), "index", None)
        if isinstance(settings, VectorIndexSettings):
            self._check_index(settings.factory)

    def _check_index(self, factory: str) -> None:
        index = index_of_any_dimension(factory)
        if index is None:
            return
        if self.config.search_parameters:
            from retrieval.indexes.vector_index import set_search_parameters

            set_search_parameters(index, self.config.search_parameters)
        if self.config.resources.gpus_per_worker:
            require_gpu_form(index, factory)

    def check_inputs(self, there: Set[str]) -> None:
        """Ids that a ranking can't name, and a split that is not judged."""
        if "collection" in there:
            require_names(id_blocks(StoredCollection(self.config.collection), "documents/"), "A document id")
        if ("queries" if self.config.queries else "collection") in there:
            require_names([_ids_of(self._asked(), self._searched())], "A query id")

    def cost(self, read: Size) -> Cost:
        """Blocks of queries meet each shard: of vectors every number, of BM25 every document."""
        queries, top_k = read.queries(self.config.split), self.config.top_k
        made = replace(read, candidates=top_k, results=top_k * queries, disk=52 * top_k * queries)
        each = 52e-12 * read.dimension if self.config.vectors else 2.9e-9
        tasks = ceil(queries / self.config.queries_per_shard) * read.shards
        return Cost(made, each * queries * read.documents, tasks)

    def phases(self) -> list[Phase]:
        """Each block of queries in each index shard, merged, then joined; refuses vectors of another encoder."""
        index = Artifact(self.config.index, INDEX)
        collection = StoredCollection(self.config.collection)
        require_same_origin("collection", collection, index)
        asked = self._asked()
        if index.config["index"]["kind"] == "lexical":
            if self.config.vectors:
                raise UserError(f"{index.uri} is a BM25 index and takes texts; leave 'vectors' out.")
            if self.config.search_parameters:
                raise UserError(
                    f"search_parameters is {self.config.search_parameters!r}, but {index.uri} is a BM25 index, which"
                    " has none. Leave it out."
                )
        else:
            if not self.config.vectors:
                raise UserError(f"{index.uri} is an index of vectors: name the 'vectors' artifact with the queries.")
            self._check_index(index.config["index"]["factory"])
            queries = StoredVectors(self.config.vectors)
            require_same_origin("collection", asked, queries)
            contract = EncoderContract.model_validate(index.manifest["facts"]["encoder"])
            contract.require_queries(queries.contract, index.uri, queries.uri)
        blocks = range(-(-len(self._searched()) // self.config.queries_per_shard))
        partial = [Partial(block, shard) for block in blocks for shard in range(len(index.shards))]
        return [
            Phase("partial", partial, self._search),
            Phase("merged", blocks, self._merge),
            Phase("run", WHOLE, self._join, intermediate=False),
        ]

    def _asked(self) -> StoredCollection:
        """The collection of the queries."""
        return StoredCollection(self.config.queries or self.config.collection)

    def _searched(self) -> NDArray[np.int64]:
        """Rows of the queries that are searched."""
        return self._asked().queries_of(self.config.split, self.config.domain)

    def _block(self, number: int) -> NDArray[np.int64]:
        """Rows of a block of queries."""
        size = self.config.queries_per_shard
        return self._searched()[number * size : (number + 1) * size]

    def _search(self, partial: Partial, writer: ShardWriter) -> ShardRecord:
        """One index shard's best for one block of queries."""
        index = Artifact(self.config.index, INDEX)
        write_ranking(writer, _partial(*partial), self._found(index, partial.shard, self._block(partial.block)))
        return writer.commit()

    def _merge(self, block: int, writer: ShardWriter) -> ShardRecord:
        """The best of all index shards."""
        index = Artifact(self.config.index, INDEX)
        found = [read_ranking(writer, _partial(block, shard)) for shard in range(len(index.shards))]
        merged, ids = merge_rankings(found, self.config.top_k), _ids_of(self._asked(), self._block(block)).to_pylist()
        return write_ranking_block(writer, ids, joined(id_blocks(index)), merged, self.config.tag)

    def _join(self, _: None, writer: ShardWriter) -> ShardRecord:
        """All blocks."""
        ids, blocks = joined(id_blocks(Artifact(self.config.index, INDEX))), self._phases["merged"].shards
        queries = _ids_of(self._asked(), self._searched()).to_pylist()
        return join_ranking_blocks(writer, blocks, queries, ids, self.config.top_k)

    def _found(self, index: Artifact, number: int, rows: NDArray[np.int64]) -> Ranking:
        asked = self._asked()
        record = index.shards[number]
        if self.config.vectors is None:
            lexical = LexicalIndex.load(index, record)
            return lexical.search(asked.texts("queries", rows), self.config.top_k, record.facts["first_row"])
        from retrieval.indexes.vector_index import read_index, search_shard, set_search_parameters, set_threads

        set_threads(self.config.resources.cpus)
        opened = read_index(index.path(f"shards/{record.name}.faiss"))
        if self.config.search_parameters:
            set_search_parameters(opened, self.config.search_parameters)
        return search_shard(
            opened,
            StoredVectors(self.config.vectors).part("queries").gather(rows),
            self.config.top_k,
            record.facts["first_row"],
            vectors_per_document=index.manifest["facts"]["vectors_per_document"],
            gpu=bool(self.config.resources.gpus_per_worker),
        )

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection of the ranking's row numbers, and what made it."""
        index = Artifact(self.config.index, INDEX)
        settings, facts = index.config["index"], index.manifest["facts"]
        system = {"with_title": facts["with_title"], "top_k": self.config.top_k}
        if settings["kind"] == "lexical":
            system |= {"index": "BM25", **settings["bm25"]}
        else:
            system |= {"index": settings["factory"], "search_parameters": self.config.search_parameters}
            left_out = ("model", "dimension", "document_model")
            system |= {key: value for key, value in facts["encoder"].items() if key not in left_out}
        origins = {"collection": StoredCollection(self.config.collection).fingerprint}
        if self.config.queries:
            origins["queries"] = self._asked().fingerprint
        return {"origins": origins, "system": system}


def _ids_of(collection: StoredCollection, rows: NDArray[np.int64]) -> pa.ChunkedArray:
    return take_texts(collection.rows_of("queries").read(["id"])["id"], rows)


def _partial(block: int, shard: int) -> str:
    return f"partial-{shard:05d}-{block:05d}"
