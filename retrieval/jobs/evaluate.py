"""`raytriever evaluate`: measures runs on a split and tests their differences."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter, is_artifact
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.configuration import Input, InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.evaluation import EVALUATION, compare_systems, format_table
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.measures import evaluate
from raytriever.retrieval.run_files import read_run
from raytriever.retrieval.runs import StoredRun
from raytriever.retrieval.storage import sha256_of


class EvaluateConfig(StageConfig):
    """Which runs (artifacts or TREC files, by the name each has in the table) are judged by which split."""

    collection: InputPath
    runs: Annotated[dict[str, str], Input()] = Field(min_length=1)
    split: str = "test"
    measures: tuple[str, ...] = Field(default=("nDCG@10", "RR@10", "R@100"), min_length=1)
    significance_level: float = Field(default=0.05, gt=0, lt=1)
    equivalence_margin: float = Field(default=0.05, gt=0)
    seed: int = 0


class Evaluate(Stage[EvaluateConfig]):
    """Per-query values, their means, and every pair of systems compared.

    Ties, missing queries: as trec_eval on the run file (equal scores in descending order of document id; a judged
    query that the run lacks counts 0).
    """

    command = "evaluate"
    kind = EVALUATION
    config_class = EvaluateConfig
    unit = "runs"

    def input_fingerprints(self) -> dict[str, str]:
        """The collection's and each run's."""
        found = {"collection": StoredCollection(self.config.collection).fingerprint}
        for name, path in self.config.runs.items():
            if is_artifact(path):
                found[f"runs.{name}"] = StoredRun(path).fingerprint
            elif Path(path).is_file():
                found[f"runs.{name}"] = sha256_of(Path(path))
            else:
                raise UserError(f"runs.{name} is {path!r}: neither a run artifact nor a TREC run file.")
        return found

    def plan(self) -> list[Shard]:
        """One shard; refuses runs over another collection and splits without judgments."""
        collection = StoredCollection(self.config.collection)
        collection.judgments(self.config.split)
        for path in self.config.runs.values():
            if is_artifact(path):
                require_same_origin("collection", collection, StoredRun(path))
        return [Shard("all")]

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Judges every run."""
        judgments = StoredCollection(self.config.collection).judgments(self.config.split)
        qrels: dict[str, dict[str, int]] = {}
        columns = (judgments[name].to_pylist() for name in ("query_id", "document_id", "relevance"))
        for query, document, relevance in zip(*columns, strict=True):
            qrels.setdefault(query, {})[document] = relevance
        measures = list(self.config.measures)
        systems = {
            name: evaluate(qrels, read_run(_run_file(path)), measures) for name, path in self.config.runs.items()
        }
        comparisons = compare_systems(systems, measures, self.config.seed, self.config.equivalence_margin)
        first = next(iter(systems.values()))
        metrics = {
            "split": self.config.split,
            "queries": len(first.query_ids),
            "queries_without_positive": first.queries_without_positive,
            "missing_queries": {name: system.missing_queries for name, system in systems.items()},
            "unjudged_queries": {name: system.unjudged_queries for name, system in systems.items()},
            "means": {
                name: {measure: system.mean(measure) for measure in measures} for name, system in systems.items()
            },
        }
        _write_json(writer, "metrics.json", metrics)
        _write_json(writer, "comparisons.json", [asdict(comparison) for comparison in comparisons])
        table = {"query_id": list(first.query_ids)}
        values = {f"{name}/{m}": pa.array(system.values[m]) for name, system in systems.items() for m in measures}
        pq.write_table(pa.table(table | values), writer.path("per_query.parquet"), compression="zstd")
        writer.add("per_query.parquet")
        return writer.commit(len(systems), counts={"queries": len(first.query_ids)})

    def summary(self, artifact: Artifact) -> str:
        """Runs and queries."""
        return f"{artifact.rows} runs on {artifact.manifest['counts']['queries']:,} queries"

    def announce(self, artifact: Artifact) -> list[str]:
        """The table."""
        metrics, comparisons = artifact.read_json("metrics.json"), artifact.read_json("comparisons.json")
        level = self.config.significance_level
        lines = ["", f"{metrics['queries']:,} queries of split '{metrics['split']}'", ""]
        lines += format_table(metrics["means"], self.config.measures, comparisons, level)
        lines += [
            "",
            f"Letters: significantly better than that system (paired t-test, Holm-corrected, p < {level}).",
            "",
        ]
        return lines


def _run_file(path: str) -> Path:
    return StoredRun(path).path("run.trec") if is_artifact(path) else Path(path)


def _write_json(writer: ShardWriter, name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)  # systems keep their order
    writer.path(name).write_text(text + "\n", encoding="utf-8")
    writer.add(name)
