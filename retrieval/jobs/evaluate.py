"""`raytriever evaluate`: measures rankings on a split and tests their differences."""

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact, require_same_origin
from raytriever.reports.log import log
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, Level, NamedInputs
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.answers import Match
from retrieval.evaluation.conventions import Conventions, Like, resolve
from retrieval.evaluation.judging import Judgments, collection_judgments, file_judgments, judge_rankings, made_with
from retrieval.evaluation.measures import DEFAULT_MEASURES, parse_measure
from retrieval.evaluation.report import Evaluated, block_lines, evaluation_blocks
from retrieval.evaluation.significance import comparable_pairs, compare_systems
from retrieval.evaluation.stored import (
    DOMAINS,
    EVALUATION,
    StoredEvaluation,
    domain_means,
    domains_of,
    how_it_was_measured,
    metrics_of,
    write_evaluation,
)
from retrieval.rankings import StoredRanking, file_fingerprint, ranking_fingerprint


class EvaluateConfig(StageConfig):
    """The rankings (artifacts or files of other tools, by their names in the table), the judgments, and the measures.

    Judgments are a split of a collection, or a file of ``qrels`` (TREC's or BEIR's format).
    """

    collection: InputPath | None = None
    """The collection with the judgments of ``split``. Give this or ``qrels``."""
    qrels: InputPath | None = None
    """A file of judgments in TREC's or BEIR's format."""
    runs: NamedInputs = Field(min_length=1)
    """Rankings by their names in the table: artifacts, or files of other tools."""
    split: str = "test"
    """Split of the collection's judgments."""
    measures: tuple[str, ...] = Field(default=DEFAULT_MEASURES, min_length=1)
    """Measures by their names in ir-measures, such as R(rel=2)@100 (grades from 2 on are relevant), and Accuracy@k."""
    like: Like = "trec"
    """The tool to agree with."""
    conventions: Conventions = Conventions()
    """Conventions that override those of ``like``."""
    answer_match: Match = "string"
    """How Accuracy@k matches an answer."""
    significance_level: Level = 0.05
    """Significance level of the letters in the table."""
    equivalence_margin: PositiveFloat = 0.05
    """Differences within ± this count as equivalent, in units of the measure."""
    by_domain: bool = False
    """Whether to report means for each domain of queries too."""
    mine: str | None = None
    """The run to compare with each of the others."""
    seed: NonNegativeInt = 0
    """Seed of the permutations and of the bootstrap."""

    def _check(self) -> None:
        if self.mine is not None and self.mine not in self.runs:
            raise ValueError(f"'mine' is {self.mine!r}, which is none of the runs ({', '.join(self.runs)})")
        if (self.collection is None) == (self.qrels is None):
            raise ValueError("Judgments come from a 'collection' or from a file of 'qrels': name one of the two")
        if self.qrels is not None and self.split != type(self).model_fields["split"].default:
            raise ValueError(
                f"'split' ({self.split}) chooses among a collection's judgments, but a file of 'qrels' is read"
                " whole: leave split out, or name a 'collection' instead"
            )
        if self.by_domain and self.collection is None:
            raise ValueError(
                "'by_domain' needs the domains of a collection's queries, which 'qrels' don't have: name a"
                " 'collection' instead, or leave by_domain out"
            )


class Evaluate(Stage[EvaluateConfig]):
    """Per-query values, their means, and every pair of systems compared."""

    command = "evaluate"
    kind = EVALUATION
    algorithm_version = 7
    config_class = EvaluateConfig
    unit = "runs"

    def resolved(self) -> dict[str, Any]:
        """The settings, with every convention as it is followed and every measure as it is computed."""
        followed = {"measures": self._measures(), "conventions": self._conventions().model_dump()}
        return super().resolved() | followed

    def _measures(self) -> list[str]:
        return list(dict.fromkeys(parse_measure(name).name for name in self.config.measures))

    def _conventions(self) -> Conventions:
        return resolve(self.config.like, self.config.conventions)

    def check_settings(self, stages: Stages) -> None:  # noqa: ARG002
        """Measures and conventions that there are not."""
        self._measures()
        self._conventions()

    def check_inputs(self, there: Set[str]) -> None:
        """A split that the collection does not judge, and judgments that are no good for the measures."""
        if there & {"collection", "qrels"}:
            self._judgments()

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """Rankings and judgments may be files."""
        if key == "qrels":
            return file_fingerprint(key, path, "not a qrels file")
        return ranking_fingerprint(key, path) if key.startswith("runs.") else super().fingerprint_of(key, path)

    def cost(self, read: Size) -> Cost:
        """One task judges all runs."""
        queries = read.queries(self.config.split)
        return Cost(replace(read, disk=0), 0.36e-3 * len(self.config.runs) * queries, min(1, queries))

    def phases(self) -> list[Phase]:
        """One task; refuses rankings over another collection."""
        if self.config.collection is not None:
            rankings = (StoredRanking(path) for path in self.config.runs.values() if is_artifact(path))
            require_same_origin("collection", StoredCollection(self.config.collection), *rankings)
        return [Phase("all", WHOLE, self._judge, intermediate=False)]

    def _judgments(self) -> Judgments:
        if self.config.collection is not None:
            return collection_judgments(self.config.collection, self.config.split, self._measures())
        return file_judgments(str(self.config.qrels), self._measures())

    def _judge(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Judges every ranking."""
        config, measures, conventions = self.config, self._measures(), self._conventions()
        judged_by = self._judgments()
        systems = judge_rankings(config.runs, judged_by, measures, conventions, config.answer_match)
        pairs = comparable_pairs(systems, measures)
        if len(pairs) < math.comb(len(systems), 2):
            log.info("  rankings that share fewer than 2 queries are not compared, because tests need at least 2")
        comparisons = compare_systems(systems, measures, config.seed, config.equivalence_margin, pairs)
        made = {name: made_with(path) for name, path in config.runs.items()}
        how = how_it_was_measured(judged_by.name, config.like, conventions, made)
        metrics: dict[str, Any] = how | metrics_of(systems, measures) | ({"mine": config.mine} if config.mine else {})
        write_evaluation(writer, metrics, systems, comparisons)
        if config.by_domain and judged_by.collection is not None:
            domains = domains_of(judged_by.collection, next(iter(systems.values())).query_ids)
            writer.add_json(DOMAINS, domain_means(systems, measures, domains))
        return writer.commit(len(systems), counts={"queries": metrics["queries"]})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """How each ranking was made (title, prompts), as far as its artifact records it."""
        return {"systems": {name: made_with(path) for name, path in self.config.runs.items()}}

    def summary(self, artifact: Artifact) -> str:
        """Runs and queries."""
        queries = artifact.manifest["counts"]["queries"]
        return f"{counted(artifact.rows, 'run')} on {counted(queries, 'query', 'queries')}"

    def announce(self, artifact: Artifact) -> list[str]:
        """The table, and what its numbers rest on."""
        stored = StoredEvaluation(artifact.uri)
        metrics = stored.metrics
        evaluated = Evaluated(metrics, stored.comparisons, self.config.significance_level, stored.domains)
        heading = f"{counted(metrics['queries'], 'query', 'queries')} of {metrics['judgments']}"
        return ["", heading, "", *block_lines(evaluation_blocks(evaluated)), ""]
