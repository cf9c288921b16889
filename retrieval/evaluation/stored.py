"""An evaluation as an artifact: means and counts, the values of each query, what was compared, means by domain."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.artifacts.artifact import Artifact, ShardWriter
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.conventions import Conventions
from retrieval.evaluation.measures import PerQuery

EVALUATION = "evaluation"
METRICS, COMPARISONS, DOMAINS, PER_QUERY = "metrics.json", "comparisons.json", "domains.json", "per_query.parquet"
_COUNTS = ("missing_queries", "unjudged_queries", "self_hits", "depth")

Domains = Mapping[str, Mapping[str, Any]]
"""Of each domain its ``queries``, ``counted_queries`` and ``runs`` (means), those of most queries first."""


class StoredEvaluation(Artifact):
    """Opens an evaluation artifact."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, EVALUATION)

    @property
    def metrics(self) -> dict[str, Any]:
        """The results of ``metrics_of`` and ``how_it_was_measured``."""
        return dict(self.read_json(METRICS))

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        """The results of ``compare_systems``. Infinite statistics are strings that ``float`` takes."""
        return list(self.read_json(COMPARISONS))

    @property
    def domains(self) -> Domains | None:
        """None where it wasn't evaluated by domain."""
        return self.read_json(DOMAINS) if self.names(DOMAINS) else None

    def values(self) -> dict[str, PerQuery]:
        """Each system's per-query values and counts."""
        metrics = self.metrics
        table = pq.ParquetFile(self.path(PER_QUERY)).read()  # read_table imports pandas where it is installed
        query_ids = tuple(table["query_id"].to_pylist())
        systems = {}
        for name in metrics["means"]:
            values = {m: table[f"{name}/{m}"].to_numpy().astype(np.float64) for m in metrics["measures"]}
            counts = {count: metrics[count][name] for count in _COUNTS}
            systems[name] = PerQuery(
                query_ids, values, queries_without_positive=metrics["queries_without_positive"], **counts
            )
        return systems


def write_evaluation(
    writer: ShardWriter,
    metrics: Mapping[str, Any],
    systems: Mapping[str, PerQuery],
    comparisons: Sequence[Mapping[str, Any]],
) -> None:
    """Adds the files that ``StoredEvaluation`` reads; ``metrics`` are of ``metrics_of`` and ``how_it_was_measured``."""
    for name, content in ((METRICS, metrics), (COMPARISONS, comparisons)):
        writer.add_json(name, content)
    writer.add_table(PER_QUERY, per_query_table(systems, metrics["measures"]))


def metrics_of(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> dict[str, Any]:
    """Means, and the counts that they rest on, as plain JSON values."""
    first = next(iter(systems.values()))
    return {
        "measures": list(measures),
        "queries": len(first.query_ids),
        "queries_without_positive": first.queries_without_positive,
        **{count: {name: getattr(system, count) for name, system in systems.items()} for count in _COUNTS},
        "counted_queries": {
            name: {measure: int((~np.isnan(system.values[measure])).sum()) for measure in measures}
            for name, system in systems.items()
        },
        "means": {name: {measure: system.mean(measure) for measure in measures} for name, system in systems.items()},
    }


def how_it_was_measured(
    judgments: str,
    like: str,
    conventions: Conventions,
    made_with: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything else that decides the numbers, for metrics.json. ``judgments``: their name in words (split 'test')."""
    return {
        "judgments": judgments,
        "like": like,
        "conventions": conventions.model_dump(),
        "made_with": {name: dict(system) for name, system in made_with.items()},
    }


def per_query_table(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> pa.Table:
    """A row a query, a column ``system/measure``; null where the query doesn't count."""
    columns: dict[str, Any] = {"query_id": pa.array(next(iter(systems.values())).query_ids, pa.string())}
    for name, system in systems.items():
        for measure in measures:
            columns[f"{name}/{measure}"] = pa.array(system.values[measure], from_pandas=True)
    return pa.table(columns)


def domains_of(collection: StoredCollection, query_ids: Sequence[str]) -> list[str]:
    """The domain of each query, '' where it has none. Raises ``UserError`` for a query that is not there."""
    domains = collection.rows_of("queries").take(collection.require("queries", query_ids), ["domain"])
    names: list[str] = domains["domain"].to_pylist()
    return names


def domain_means(
    systems: Mapping[str, PerQuery], measures: Sequence[str], domains: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """For each domain its number of queries, and every system's mean of every measure over those that count.

    ``domains[i]``: of query i of each system; all systems have the same queries. ``counted_queries``: how many count,
    by system and measure. Weighted by them, the means of all domains give the overall mean. None: no query of the
    domain counts.
    """
    # objects: NumPy's own strings lose NULs at their end
    names, numbers, sizes = np.unique(np.array(domains, dtype=object), return_inverse=True, return_counts=True)
    rows_of = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
    found = {}
    for number in sorted(range(len(names)), key=lambda number: (-sizes[number], names[number])):
        counts: dict[str, dict[str, int]] = {name: {} for name in systems}
        means: dict[str, dict[str, float | None]] = {name: {} for name in systems}
        for name, system in systems.items():
            for measure in measures:
                values = system.values[measure][rows_of[number]]
                values = values[~np.isnan(values)]
                counts[name][measure] = len(values)
                means[name][measure] = float(values.mean()) if len(values) else None
        found[str(names[number])] = {"queries": int(sizes[number]), "counted_queries": counts, "runs": means}
    return found
