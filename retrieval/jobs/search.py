"""`raytriever search`: the queries of a split against an index; writes a TREC run."""

from collections.abc import Set
from dataclasses import replace
from math import ceil
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.artifacts.long_columns import joined, take_texts
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Shard, Stage, StageConfig, Stages, made_by
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
    """Which queries are searched where."""

    index: InputPath
    """Of vectors or of words."""
    collection: InputPath
    """Whose documents are indexed and whose queries are searched."""
    queries: InputPath | None = None
    """Another collection, whose queries are searched instead."""
    vectors: InputPath | None = None
    """The queries' vectors, for an index of vectors."""
    split: str | None = "test"
    """The queries that it judges; null: every query."""
    domain: str | None = None
    """Of those the ones of this domain; null: of any."""
    top_k: int = Field(default=100, gt=0)
    """Results of each query."""
    search_parameters: Annotated[str, BeforeValidator(lambda given: "" if given is None else given)] = ""
    """As FAISS writes them: nprobe=64, efSearch=128; null: none."""
    queries_per_shard: int = Field(default=8192, gt=0)
    """Queries that are searched in one task."""
    tag: Tag = "raytriever"
    """Names the system in the TREC file."""


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
        if index is not None and self.config.search_parameters:
            from retrieval.indexes.vector_index import set_search_parameters

            set_search_parameters(index, self.config.search_parameters)
        if index is not None and self.config.resources.gpus_per_worker:
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

    def plan(self) -> list[Shard]:
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
        rows = self._searched()
        blocks = range(-(-len(rows) // self.config.queries_per_shard))
        partial = [
            Shard(_partial(record, block), {"shard": number, "block": block}, phase=0, intermediate=True)
            for block in blocks
            for number, record in enumerate(index.shards)
        ]
        merged = [
            Shard(_merged(block), {"shard": None, "block": block}, phase=1, intermediate=True) for block in blocks
        ]
        return [*partial, *merged, Shard("run", {"blocks": len(blocks)}, phase=2)]

    def _asked(self) -> StoredCollection:
        """The collection whose queries are searched."""
        return StoredCollection(self.config.queries or self.config.collection)

    def _searched(self) -> NDArray[np.int64]:
        """Rows of the queries that are searched."""
        return self._asked().queries_of(self.config.split, self.config.domain)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One index shard's best for one block of queries, their merge, or all blocks joined."""
        config, index, asked, rows = self.config, Artifact(self.config.index, INDEX), self._asked(), self._searched()
        if shard.name == "run":
            blocks, ids = map(_merged, range(shard.description["blocks"])), _ids_of(asked, rows).to_pylist()
            return join_ranking_blocks(writer, blocks, ids, joined(id_blocks(index)), config.top_k)
        start = shard.description["block"] * config.queries_per_shard
        block = rows[start : start + config.queries_per_shard]
        if shard.description["shard"] is not None:
            write_ranking(writer, shard.name, self._search(index, shard.description["shard"], asked, block))
            return writer.commit(0)
        partial = [read_ranking(writer, _partial(record, shard.description["block"])) for record in index.shards]
        merged, ids = merge_rankings(partial, config.top_k), _ids_of(asked, block).to_pylist()
        return write_ranking_block(writer, shard.name, ids, joined(id_blocks(index)), merged, config.tag)

    def _search(self, index: Artifact, number: int, asked: StoredCollection, rows: NDArray[np.int64]) -> Ranking:
        record = index.shards[number]
        if self.config.vectors is None:
            lexical = LexicalIndex.load(index, record)
            return lexical.search(asked.texts("queries", rows), self.config.top_k, record.facts["first_row"])
        from retrieval.indexes.vector_index import read_index, search_shard, set_search_parameters, set_threads

        set_threads(max(1, int(self.config.resources.cpus)))
        opened = read_index(index.path(f"shards/{record.name}.faiss"))
        if self.config.search_parameters:
            set_search_parameters(opened, self.config.search_parameters)
        return search_shard(
            opened,
            StoredVectors(self.config.vectors).part("queries").gather(rows),
            self.config.top_k,
            record.facts["first_row"],
            vectors_per_document=index.manifest["facts"].get("vectors_per_document", 1),
            gpu=self.config.resources.gpus_per_worker > 0,
        )

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection whose row numbers the ranking uses, and what made it."""
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


def _partial(record: ShardRecord, block: int) -> str:
    return f"partial-{record.name}-{block:05d}"


def _merged(block: int) -> str:
    return f"merged-{block:05d}"
