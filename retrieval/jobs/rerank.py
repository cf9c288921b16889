"""`raytriever rerank`: a first stage's best candidates, reranked by an encoder's vectors or a module over them."""

from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any

from pydantic import PositiveInt

from raytriever.artifacts.artifact import ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import LocatedModel, locate_model
from retrieval.evaluation.judging import made_with
from retrieval.indexes.top_k import Ranking
from retrieval.rankings import RANKING, Tag, join_ranking_blocks, open_ranking, ranking_fingerprint, write_ranking_block
from retrieval.vectors import StoredVectors


class RerankConfig(StageConfig):
    """The ranking, and the vectors that score its candidates."""

    run: InputPath
    """The ranking to rerank: an artifact, or a file of another tool."""
    vectors: InputPath
    """The documents' vectors: those of its index, or another encoder's."""
    query_vectors: InputPath | None = None
    """The queries' vectors, where ``vectors`` has none (for an encoder of queries only)."""
    scoring: InputPath | None = None
    """A model trained with a module that scores whole lists. null: inner products."""
    collection: InputPath
    """The collection of the ranking and the vectors."""
    depth: PositiveInt = 100
    """Candidates to rerank for each query. The others are dropped."""
    top_k: PositiveInt | None = None
    """Results kept for each query. null: all."""
    queries_per_shard: PositiveInt = 1024
    """Queries scored in one task."""
    tag: Tag = "reranked"
    """Name of the system in the TREC file."""


class Rerank(Stage[RerankConfig]):
    """Exact inner products of each query with its candidates, or a trained module's scores, from stored vectors."""

    command = "rerank"
    kind = RANKING
    algorithm_version = 3
    config_class = RerankConfig
    unit = "queries"
    results = ("run.trec",)

    @cached_property
    def _scoring(self) -> LocatedModel | None:
        return locate_model(self.config.scoring) if self.config.scoring else None

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """A run's may be a file's, and the scoring module's model may be any folder."""
        if key == "scoring" and self._scoring:
            return self._scoring.fingerprint
        return ranking_fingerprint(key, path) if key == "run" else super().fingerprint_of(key, path)

    def cost(self, read: Size) -> Cost:
        """Blocks of queries are tasks; each candidate's vector meets its query's."""
        queries, depth = read.results // max(1, read.candidates), min(self.config.depth, read.candidates)
        made = replace(read, candidates=depth, results=depth * queries, disk=52 * depth * queries)
        tasks = ceil(queries / self.config.queries_per_shard)
        return Cost(made, 8e-9 * made.results * read.dimension, tasks)

    def phases(self) -> list[Phase]:
        """Blocks of queries, then one ranking; refuses a ranking or vectors of another collection."""
        vectors, collection = StoredVectors(self.config.vectors), StoredCollection(self.config.collection)
        require_same_origin("collection", collection, vectors)
        given = open_ranking(self.config.run, collection)
        asked = self._asked()
        if asked.uri != vectors.uri:
            require_same_origin("collection", collection, asked)
            by_scorer = self.config.scoring is not None
            vectors.contract.require_queries(asked.contract, vectors.uri, asked.uri, by_list_scorer=by_scorer)
        if self.config.scoring and self._scoring:
            _require_scorer_of(self.config.scoring, self._scoring, asked, vectors)
        queries = len(given.ranking().rows)
        if not queries:
            raise UserError(f"{given.uri} answers no query, so there is nothing to rerank.")
        vectors.part("documents")  # refused here where absent, as the queries are
        asked.part("queries")
        starts = range(0, queries, self.config.queries_per_shard)
        return [Phase("partial", starts, self._rank), Phase("run", WHOLE, self._join, intermediate=False)]

    def _asked(self) -> StoredVectors:
        """The queries' vectors."""
        return StoredVectors(self.config.query_vectors or self.config.vectors)

    def _widths(self, ranking: Ranking) -> tuple[int, int]:
        """Numbers of a query's candidates that are read and kept."""
        depth = min(self.config.depth, ranking.rows.shape[1])
        return depth, min(depth, self.config.top_k or depth)

    def _join(self, _: None, writer: ShardWriter) -> ShardRecord:
        given = open_ranking(self.config.run, StoredCollection(self.config.collection))
        width, blocks = self._widths(given.ranking())[1], self._phases["partial"].shards
        return join_ranking_blocks(writer, blocks, given.query_ids(), given.document_ids(), width)

    def _rank(self, start: int, writer: ShardWriter) -> ShardRecord:
        """Scores one block of queries, from ``start`` on."""
        from retrieval.rerank import rerank, rerank_lists

        collection = StoredCollection(self.config.collection)
        given = open_ranking(self.config.run, collection)
        query_ids, (depth, width) = given.query_ids(), self._widths(given.ranking())
        block = slice(start, start + self.config.queries_per_shard)
        candidates = Ranking(given.ranking().rows[block, :depth], given.ranking().scores[block, :depth])
        vectors = StoredVectors(self.config.vectors)
        query_rows = collection.require("queries", query_ids[block])
        queries = self._asked().part("queries").gather(query_rows)
        documents = vectors.part("documents").gather
        if self._scoring is None:
            ranking = rerank(candidates, queries, documents, width)
        else:
            from retrieval.encoders.list_scorer import load_list_scorer

            scorer = load_list_scorer(self._scoring.path)
            ranking = rerank_lists(candidates, queries, documents, scorer, width)
        ids = query_ids[block]
        return write_ranking_block(writer, ids, given.document_ids(), ranking, self.config.tag)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection of the ranking's row numbers, and what made it."""
        vectors, collection = StoredVectors(self.config.vectors), StoredCollection(self.config.collection)
        contract = vectors.contract.model_dump(exclude={"model", "dimension", "document_model"})
        system = made_with(self.config.run) | contract
        system |= {"with_title": vectors.with_title, "reranked": self.config.depth}
        if self._scoring is not None:
            from retrieval.encoders.list_scorer import list_scorer_beside

            system["scoring"] = list_scorer_beside(self._scoring.path)
        system["top_k"] = self.config.top_k or self.config.depth
        return {"origins": {"collection": require_same_origin("collection", collection, vectors)}, "system": system}


def _require_scorer_of(model: str, located: LocatedModel, queries: StoredVectors, documents: StoredVectors) -> None:
    """The module was trained with the encoder behind the queries, over these documents; ``UserError`` where not."""
    from retrieval.encoders.list_scorer import load_list_scorer

    load_list_scorer(located.path)
    trained_for = queries.contract.document_model
    if (queries.contract.model, trained_for) != (located.fingerprint, documents.contract.fingerprint):
        raise UserError(
            f"The scoring module of {model} was trained with the query encoder beside it and the documents of its"
            f" training (objective.documents). The queries of {queries.uri} or the documents of {documents.uri}"
            f" are of other encoders. Embed the queries with encoder.model {model} and 'parts: [queries]' and name"
            " the result in query_vectors. Name those documents in vectors."
        )
