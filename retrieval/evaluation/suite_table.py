"""One table over several collections: a row for each system, published figures beside it, and which differ in the mean.

The mean is over columns, as BEIR reports it. Collections of a group make one column, their own mean. A suite's table
stands beside that of MTEB's tasks. Their main scores have the means that MTEB takes.

``published.csv`` holds one line for each figure of five papers' tables: ``paper,table,row,collection,measure,figure``.
Figures are fractions with the printed digits; nDCG@10 of 46.1 % is 0.461. Measures have our names. Two need a word:
binary measures of TREC DL name the grade that their column counts (``R(rel=2)@1000``), and ``main_score`` is what MTEB
reports of a kind of task. A printed mean has the collection ``mean`` where it is over the row's other columns, else
``mean of …``. A cell that can't be read with certainty in the papers' texts is left out.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from raytriever.errors import UserError
from raytriever.reports.table import Cell, Table
from raytriever.settings.configuration import did_you_mean
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.report import LETTERS, signed, worse_than
from retrieval.evaluation.significance import holm, paired_difference, shared_values, stratified_z_test

_FIGURES = Path(__file__).with_name("published.csv")


PAPERS = {
    "revela": "Cai et al. 2025, Revela, https://arxiv.org/abs/2506.16552",
    "adaptive_margins": "Gienapp et al. 2025, Self-Distillation with Adaptive Relevance Margins,"
    " https://arxiv.org/abs/2407.21515",
    "multi_layer": "Xie & Lukasiewicz 2025, Multi-layer Representations for Dense Passage Retrieval,"
    " https://aclanthology.org/2025.findings-emnlp.1333/",
    "coder": "Zerveas et al. 2022, CODER, https://arxiv.org/abs/2112.08766",
    "contextual": "Morris & Rush 2024, Contextual Document Embeddings, https://arxiv.org/abs/2410.02525",
}
"""By the name that the first column has; the titles are short forms."""


@dataclass(frozen=True)
class PublishedRow:
    """The figures of one row (one system) in a paper's table.

    ``figures``: (collection, measure) to a fraction, in the order of the table's columns.
    """

    paper: str
    table: str
    row: str
    figures: Mapping[tuple[str, str], float]


def published_row(name: str) -> PublishedRow:
    """The row ``paper/table/row``, such as ``revela/1/Revela 135M``.

    Raises ``UserError`` for a name of another form, and for an unknown paper, table or row.
    """
    parts = name.split("/", 2)
    if len(parts) < 3:
        raise UserError(
            f"'{name}' names no published result. Allowed is paper/table/row, such as 'revela/1/Revela 135M'."
        )
    with _FIGURES.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for place, column in enumerate(("paper", "table", "row")):
        known = list(dict.fromkeys(line[column] for line in lines))
        lines = [line for line in lines if line[column] == parts[place]]
        if not lines:
            hint = did_you_mean(parts[place], known)
            of = f" of {'/'.join(parts[:place])}" if place else ""
            raise UserError(f"'{name}': no {column} '{parts[place]}'{of} is kept.{hint}")
    figures = {(line["collection"], line["measure"]): float(line["figure"]) for line in lines}
    return PublishedRow(parts[0], parts[1], parts[2], figures)


MEAN = "mean"

Evaluations = Mapping[str, Mapping[str, PerQuery]]
"""Of each collection each system's values of each query."""


@dataclass(frozen=True)
class MeasureTable:
    """A measure of all systems on all collections that have it.

    ``columns``: for each the collections in its mean, a single one without a group. ``values``: by system and column.
    ``means``: by system, over the columns. ``comparisons``: for each pair of systems the difference of their means, and
    p of the z-test, Holm-corrected.
    """

    measure: str
    columns: Mapping[str, Sequence[str]]
    values: Mapping[str, Mapping[str, float]]
    means: Mapping[str, float]
    comparisons: Sequence[Mapping[str, Any]]


def measure_tables(evaluations: Evaluations, groups: Mapping[str, Sequence[str]]) -> list[MeasureTable]:
    """A table for each measure, in the collections' order. Raises as ``require_same_systems``."""
    require_same_systems({name: list(systems) for name, systems in evaluations.items()}, groups)
    measures = dict.fromkeys(
        measure for systems in evaluations.values() for system in systems.values() for measure in system.values
    )
    return [_measure_table(measure, evaluations, groups) for measure in measures]


def require_same_systems(systems: Mapping[str, Sequence[str]], groups: Mapping[str, Sequence[str]]) -> None:
    """``UserError`` for a group of what is no collection, and where collections have different systems."""
    for group, members in groups.items():
        if unknown := sorted(set(members) - set(systems)):
            raise UserError(f"groups.{group} has {', '.join(unknown)}; the collections are {', '.join(systems)}.")
    first, *others = systems
    for other in others:
        if list(systems[other]) != list(systems[first]):
            here, there = (", ".join(systems[name]) for name in (first, other))
            raise UserError(f"{first} has the systems {here}, and {other} {there}. Evaluate the same systems on both.")


def _measure_table(measure: str, evaluations: Evaluations, groups: Mapping[str, Sequence[str]]) -> MeasureTable:
    measured = {
        name: systems for name, systems in evaluations.items() if measure in next(iter(systems.values())).values
    }
    group_of = {member: group for group, members in groups.items() for member in members}
    columns: dict[str, list[str]] = {}
    for name in measured:
        columns.setdefault(group_of.get(name, name), []).append(name)
    systems = list(next(iter(measured.values())))
    values = {
        system: {
            column: float(np.mean([measured[name][system].mean(measure) for name in names]))
            for column, names in columns.items()
        }
        for system in systems
    }
    means = {system: float(np.mean(list(of_system.values()))) for system, of_system in values.items()}
    return MeasureTable(measure, columns, values, means, _comparisons(measure, measured, columns, systems))


def _comparisons(
    measure: str, measured: Evaluations, columns: Mapping[str, Sequence[str]], systems: Sequence[str]
) -> list[dict[str, Any]]:
    """Each pair of systems, the later one minus the earlier one; none where a collection has fewer than two queries."""
    weights = {name: 1 / (len(columns) * len(names)) for names in columns.values() for name in names}
    found = []
    for earlier, later in combinations(systems, 2):
        differences = []
        for of_collection in measured.values():
            a, b = shared_values(of_collection, later, earlier, measure)
            if len(a) < 2:
                return []
            differences.append(paired_difference(a, b))
        test = stratified_z_test(differences, [weights[name] for name in measured])
        queries = sum(map(len, differences))
        found.append({"a": later, "b": earlier, "queries": queries, "z": test.statistic, "p": test.p_value})
        found[-1]["difference"] = float(
            sum(weights[name] * of_pair.mean() for name, of_pair in zip(measured, differences, strict=True))
        )
    corrected = holm(np.array([comparison["p"] for comparison in found]))
    return [comparison | {"holm": float(p)} for comparison, p in zip(found, corrected, strict=True)]


def published_figures(table: MeasureTable, row: PublishedRow) -> dict[str, float]:
    """The row's figures for the table's columns, and their mean where there is one for each of them.

    A printed mean stands in for that where nothing else is printed; of other collections it is another quantity.
    """
    figures = {collection: figure for (collection, measure), figure in row.figures.items() if measure == table.measure}
    found = {column: figures[column] for column in table.columns if column in figures}
    if len(found) == len(table.columns):
        found[MEAN] = float(np.mean(list(found.values())))
    elif list(figures) == [MEAN]:
        found[MEAN] = figures[MEAN]
    return found


def shown_table(table: MeasureTable, published: Mapping[str, PublishedRow], level: float) -> Table:
    """A row for each system, below it what a paper prints and the difference; letters behind the mean.

    ``level``: p below which a difference of means gets its letter.
    """
    letters = dict(zip(table.values, LETTERS, strict=False))
    best = {column: max(values[column] for values in table.values.values()) for column in table.columns}
    has_mean = len(table.columns) > 1
    rows: list[list[str | Cell]] = []
    for system, values in table.values.items():
        cells: list[str | Cell] = [
            Cell(f"{values[column]:.4f}", is_strong=len(table.values) > 1 and values[column] == best[column])
            for column in table.columns
        ]
        if has_mean:
            compared = [(found["a"], found["b"], found["difference"], found["holm"]) for found in table.comparisons]
            lower = "".join(sorted(letters.get(name, "") for name in worse_than(system, compared, level)))
            cells.append(Cell(f"{table.means[system]:.4f}", lower))
        rows.append([letters.get(system, ""), system, *cells])
        if system in published and (figures := published_figures(table, published[system])):
            ours = {**values, **({MEAN: table.means[system]} if has_mean else {})}
            rows.extend(["", *line] for line in published_rows(published[system], figures, ours))
    columns = [*table.columns, *([MEAN] if has_mean else [])]
    return Table(["", table.measure, *columns], rows, _caption(table, published, level), text_columns=2)


def published_rows(row: PublishedRow, figures: Mapping[str, float], ours: Mapping[str, float]) -> list[list[str]]:
    """The row's figures and our difference from them, below our figures; '-' for a missing one."""
    printed = [f"{figures[column]:.4f}" if column in figures else "-" for column in ours]
    differences = [signed(ours[column] - figures[column]) if column in figures else "-" for column in ours]
    return [[f"  {row.paper}, table {row.table}: {row.row}", *printed], ["  difference", *differences]]


def _caption(table: MeasureTable, published: Mapping[str, PublishedRow], level: float) -> str:
    said = []
    if table.comparisons:
        said.append(
            "Letters behind the mean: significantly better than that system (z-test of the mean over collections,"
            f" queries paired within each, Holm-corrected, p < {level:g})."
        )
    if grouped := [f"{column} of {len(names)}" for column, names in table.columns.items() if len(names) > 1]:
        said.append(f"Means of collections: {', '.join(grouped)}.")
    shown = [row for row in published.values() if published_figures(table, row)]
    for paper in dict.fromkeys(row.paper for row in shown):
        said.append(f"{paper}: {PAPERS[paper]}.")
    return " ".join(said)


_PUBLISHED_MEAN = "mean of mteb tasks"


def summarize(model: str, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All scores of ``tasks`` (``task``, ``category``, ``main_score``), a mean for each category, both means.

    ``mean`` is over tasks, ``mean_of_categories`` over those.
    """
    by_category: dict[str, list[float]] = {}
    for task in sorted(tasks, key=lambda task: str(task["category"])):
        by_category.setdefault(task["category"], []).append(task["main_score"])
    categories = {name: {"tasks": len(of), "mean": float(np.mean(of))} for name, of in by_category.items()}
    return {
        "model": model,
        "mean": float(np.mean([task["main_score"] for task in tasks])),
        "mean_of_categories": float(np.mean([each["mean"] for each in categories.values()])),
        "categories": categories,
        "tasks": {task["task"]: {key: value for key, value in task.items() if key != "task"} for task in tasks},
    }


def published_scores(row: PublishedRow, categories: Sequence[str]) -> dict[str, float]:
    """The row's figures for these categories, and its mean over tasks. Raises ``UserError`` if it has none."""
    printed = {collection: figure for (collection, _), figure in row.figures.items()}
    places = {category: f"mteb_{re.sub('(?<=[a-z])(?=[A-Z])', '_', category).lower()}" for category in categories}
    found = {category: printed[place] for category, place in places.items() if place in printed}
    if not found:
        raise UserError(
            f"published is '{row.paper}/{row.table}/{row.row}', which prints {', '.join(printed)}, but none of"
            " MTEB's scores on these tasks. Choose another row, such as 'contextual/2/cde-small-v1 contextual'."
        )
    return found | ({MEAN: printed[_PUBLISHED_MEAN]} if _PUBLISHED_MEAN in printed else {})


def shown_scores(results: Mapping[str, Any], published: PublishedRow | None) -> Table:
    """A row of the means by category, below it what the paper prints and the differences."""
    categories = results["categories"]
    ours = {name: each["mean"] for name, each in categories.items()} | {MEAN: results["mean"]}
    rows: list[list[str | Cell]] = [
        ["tasks", *(str(each["tasks"]) for each in categories.values()), str(len(results["tasks"]))],
        [results["model"], *(f"{value:.4f}" for value in ours.values())],
    ]
    caption = f"Main scores by category; the mean is over tasks (over categories: {results['mean_of_categories']:.4f})."
    if published is not None:
        theirs = published_scores(published, list(categories))
        for cells in published_rows(published, theirs, ours):
            rows.append([*cells])
        caption += f" {published.paper}: {PAPERS[published.paper]}; its mean is over all of its tasks."
    return Table(["MTEB", *ours], rows, caption)
