"""`raytriever fuse`: several runs into one by reciprocal rank."""

from typing import Annotated, Any

from pydantic import Field

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import Input
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.fusion import reciprocal_rank_fusion
from retrieval.rankings import RANKING, StoredRanking, Tag, write_stored_ranking


class FuseConfig(StageConfig):
    """Which rankings are fused, and how."""

    runs: Annotated[dict[str, str], Input()] = Field(min_length=2)
    """The rankings by the name that each has in the manifest."""
    rank_constant: int = Field(default=60, gt=0)
    """k in 1 / (k + rank)."""
    depth: int = Field(default=200, gt=0)
    """Results read of each ranking, and kept of the fusion."""
    tag: Tag = "rrf"
    """Names the system in the TREC file."""


class Fuse(Stage[FuseConfig]):
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)."""

    command = "fuse"
    kind = RANKING
    config_class = FuseConfig
    unit = "queries"

    def plan(self) -> list[Shard]:
        """One shard; refuses runs over different collections or queries."""
        runs = [StoredRanking(path) for path in self.config.runs.values()]
        require_same_origin("collection", *runs)
        first = runs[0]
        for other in runs[1:]:
            here, there = _asked(first), _asked(other)
            if here != there:  # equal ids may be other queries there
                raise UserError(
                    f"{first.uri} and {other.uri} answer the queries of different collections ({here[:12]} against"
                    f" {there[:12]}). Search both with the queries of one."
                )
            if other.query_ids() != first.query_ids():
                raise UserError(f"{first.uri} and {other.uri} answer different queries. Search both with one split.")
        return [Shard("run")]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Fuses and writes the run."""
        runs = [StoredRanking(path) for path in self.config.runs.values()]
        rankings = [run.ranking() for run in runs]
        fused = reciprocal_rank_fusion(rankings, self.config.rank_constant, self.config.depth)
        documents = runs[0].document_ids()
        return write_stored_ranking(writer, runs[0].query_ids(), documents, [fused], self.config.depth, self.config.tag)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The collection whose row numbers the run uses, and the one whose queries it answers where it is another."""
        runs = {name: StoredRanking(path) for name, path in self.config.runs.items()}
        system = {"fusion": f"reciprocal rank, k = {self.config.rank_constant}, top {self.config.depth}"}
        # what all fused runs share is true of the fusion as well
        first, *others = [run.system for run in runs.values()]
        system |= {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
        origins = {"collection": require_same_origin("collection", *runs.values())}
        asked = _asked(next(iter(runs.values())))
        if asked != origins["collection"]:
            origins["queries"] = asked
        return {"origins": origins, "system": system}

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The run file."""
        return ["run.trec"]


def _asked(run: StoredRanking) -> str:
    """Fingerprint of the collection whose queries the run answers."""
    return origin(run, "queries") or require_same_origin("collection", run)
