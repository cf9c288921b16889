"""Main scores of MTEB's tasks, their means as MTEB takes them, and one table beside what a paper prints."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytriever.errors import UserError
from raytriever.reports.table import Cell, Table
from retrieval.evaluation.published import PAPERS, PublishedRow
from retrieval.evaluation.suite_table import MEAN, published_rows

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
