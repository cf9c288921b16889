"""`raytriever table`: evaluations of several collections in one table, beside what papers print."""

from collections.abc import Set
from dataclasses import asdict
from typing import Any

from pydantic import Field

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.report import Section, render
from raytriever.reports.table import counted
from raytriever.settings.configuration import Level, NamedInputs, did_you_mean
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages, made_by
from retrieval.evaluation.report import block_lines
from retrieval.evaluation.stored import StoredEvaluation
from retrieval.evaluation.suite_table import (
    MEAN,
    MeasureTable,
    measure_tables,
    published_row,
    require_same_systems,
    shown_table,
)

TABLES = "tables"
RESULTS, PAGE = "results.json", "table.html"


class TableConfig(StageConfig):
    """The evaluations, and what is shown beside them."""

    evaluations: NamedInputs = Field(min_length=1)
    """Evaluations of the same systems by their names in the table."""
    groups: dict[str, tuple[str, ...]] = Field(default={})
    """Names of evaluations that become one column, their mean, by the column's name."""
    published: dict[str, str] = Field(default={})
    """The row of a paper to show beside a system: paper/table/row, such as revela/1/BM25."""
    significance_level: Level = 0.05
    """Significance level of the letters."""


class SuiteTable(Stage[TableConfig]):
    """A table for each measure: systems by collections, their mean, its significance, and published figures."""

    command = "table"
    kind = TABLES
    config_class = TableConfig
    unit = "collections"
    results = (PAGE,)
    shows_inputs = True

    def check_settings(self, stages: Stages) -> None:
        """Refuses a published row that doesn't exist, or has no figure that is measured here."""
        evaluations = {name: made_by(stages, path) for name, path in self.config.evaluations.items()}
        for name, stage in evaluations.items():
            if stage is not None and stage.command != "evaluate":
                raise UserError(f"evaluations.{name} is made by {stage.command}. A table has those of evaluate alone.")
        measured = {name: stage.resolved()["measures"] for name, stage in evaluations.items() if stage is not None}
        group_of = {member: group for group, members in self.config.groups.items() for member in members}
        columns = {(group_of.get(name, name), measure) for name, measures in measured.items() for measure in measures}
        columns |= {(MEAN, measure) for _, measure in columns}
        for system, name in self.config.published.items():
            row = published_row(name)
            if len(measured) == len(evaluations) and columns.isdisjoint(row.figures):
                printed = ", ".join(dict.fromkeys(f"{measure} on {column}" for column, measure in row.figures))
                raise UserError(
                    f"published.{system} is '{name}', which prints {printed}, but nothing of it is measured here."
                    " Choose another row, or add its measure to those of evaluate."
                )
            for stage in evaluations.values():
                if stage is not None and system not in stage.config.runs:
                    raise UserError(
                        f"published.{system}: no such system.{did_you_mean(system, list(stage.config.runs))}"
                    )

    def check_inputs(self, there: Set[str]) -> None:
        """Evaluations of different systems."""
        evaluations = self.config.evaluations
        if all(f"evaluations.{name}" in there for name in evaluations):
            systems = {name: list(StoredEvaluation(path).metrics["means"]) for name, path in evaluations.items()}
            require_same_systems(systems, self.config.groups)

    def phases(self) -> list[Phase]:
        """One task."""
        return [Phase("all", WHOLE, self._write, intermediate=False)]

    def _write(self, _: None, writer: ShardWriter) -> ShardRecord:
        """All tables, as JSON and as a page."""
        evaluations = {name: StoredEvaluation(path).values() for name, path in self.config.evaluations.items()}
        tables = measure_tables(evaluations, self.config.groups)
        writer.add_json(RESULTS, [asdict(table) for table in tables])
        columns = len(self.config.evaluations)
        subtitle = f"Raytriever · {counted(len(tables[0].values), 'system')} on {counted(columns, 'collection')}"
        sections = [
            Section(table.measure, "", [shown]) for table, shown in zip(tables, self._shown(tables), strict=True)
        ]
        writer.add_bytes(PAGE, render("Systems by collection", subtitle, sections).encode())
        return writer.commit(columns)

    def _shown(self, tables: list[MeasureTable]) -> list[Any]:
        published = {system: published_row(name) for system, name in self.config.published.items()}
        return [shown_table(table, published, self.config.significance_level) for table in tables]

    def announce(self, artifact: Artifact) -> list[str]:
        """The tables."""
        tables = [MeasureTable(**values) for values in artifact.read_json(RESULTS)]
        return ["", *block_lines(self._shown(tables)), ""]
