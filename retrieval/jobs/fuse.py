"""`raytriever fuse`: several rankings into one by reciprocal rank."""

from dataclasses import replace
from math import ceil
from typing import Any

from pydantic import Field, PositiveInt

from raytriever.artifacts.artifact import ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import NamedInputs
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig
from retrieval.indexes.top_k import Ranking, reciprocal_rank_fusion
from retrieval.rankings import RANKING, StoredRanking, Tag, join_ranking_blocks, write_ranking_block


class FuseConfig(StageConfig):
    """The rankings to fuse, and how."""

    runs: NamedInputs = Field(min_length=2)
    """The rankings by their names in the manifest."""
    rank_constant: PositiveInt = 60
    """k in 1 / (k + rank)."""
    depth: PositiveInt = 200
    """Results read from each ranking and kept after fusion."""
    queries_per_shard: PositiveInt = 8192
    """Queries fused in one task."""
    tag: Tag = "rrf"
    """Name of the system in the TREC file."""


class Fuse(Stage[FuseConfig]):
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)."""

    command = "fuse"
    kind = RANKING
    algorithm_version = 3
    config_class = FuseConfig
    unit = "queries"
    results = ("run.trec",)

    def cost(self, read: Size) -> Cost:
        """Blocks of queries are tasks; results of all runs are counted."""
        tasks = ceil(read.results / max(1, read.candidates) / self.config.queries_per_shard)
        return Cost(replace(read, disk=52 * read.results), 0.43e-6 * len(self.config.runs) * read.results, tasks)

    def phases(self) -> list[Phase]:
        """Blocks of queries, then one ranking; refuses rankings over different collections or queries."""
        stored = [StoredRanking(path) for path in self.config.runs.values()]
        require_same_origin("collection", *stored)
        first = stored[0]
        for other in stored[1:]:
            here, there = _asked(first), _asked(other)
            if here != there:  # equal ids may be other queries there
                raise UserError(
                    f"{first.uri} and {other.uri} answer the queries of different collections ({here[:12]} against"
                    f" {there[:12]}). Search both with the queries of one."
                )
            if other.query_ids() != first.query_ids():
                raise UserError(f"{first.uri} and {other.uri} answer different queries. Search both with one split.")
        starts = range(0, len(first.query_ids()), self.config.queries_per_shard)
        return [Phase("fused", starts, self._fuse), Phase("run", WHOLE, self._join, intermediate=False)]

    def _join(self, _: None, writer: ShardWriter) -> ShardRecord:
        blocks, stored = self._phases["fused"].shards, StoredRanking(next(iter(self.config.runs.values())))
        return join_ranking_blocks(writer, blocks, stored.query_ids(), stored.document_ids(), self.config.depth)

    def _fuse(self, start: int, writer: ShardWriter) -> ShardRecord:
        """The queries of a block, from ``start`` on."""
        config, stored = self.config, [StoredRanking(path) for path in self.config.runs.values()]
        query_ids, document_ids = stored[0].query_ids(), stored[0].document_ids()
        block = slice(start, start + config.queries_per_shard)
        rankings = [Ranking(of.rows[block], of.scores[block]) for of in (each.ranking() for each in stored)]
        fused = reciprocal_rank_fusion(rankings, config.rank_constant, config.depth)
        return write_ranking_block(writer, query_ids[block], document_ids, fused, config.tag)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection of the ranking's row numbers, and that of its queries if it is another."""
        stored = {name: StoredRanking(path) for name, path in self.config.runs.items()}
        system = {"fusion": f"reciprocal rank, k = {self.config.rank_constant}, top {self.config.depth}"}
        # what all fused rankings share is true of the fusion as well
        first, *others = [each.system for each in stored.values()]
        system |= {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
        origins = {"collection": require_same_origin("collection", *stored.values())}
        asked = _asked(next(iter(stored.values())))
        if asked != origins["collection"]:
            origins["queries"] = asked
        return {"origins": origins, "system": system}


def _asked(ranking: StoredRanking) -> str:
    """Fingerprint of the collection with the ranking's queries."""
    return origin(ranking, "queries") or require_same_origin("collection", ranking)
