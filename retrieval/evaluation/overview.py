"""One table over evaluations of the same systems on several collections."""

from collections.abc import Mapping
from typing import Any

_MEAN = "mean"


def overview_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table for each measure that all have: a row for each system, a column for each collection.

    ``metrics``: what an evaluation's ``metrics.json`` holds, by collection. The last column is the plain mean over
    collections, as BEIR reports it. Nothing where there are fewer than two, or they share no system.
    """
    evaluations = list(metrics.values())
    if len(evaluations) < 2:
        return []
    systems = [name for name in evaluations[0]["means"] if all(name in each["means"] for each in evaluations)]
    measures = [name for name in evaluations[0]["measures"] if all(name in each["measures"] for each in evaluations)]
    if not systems:
        return []
    names = [*metrics, _MEAN]
    width = max(len(name) for name in systems) + 2
    lines = []
    for measure in measures:
        label = f"{measure} by collection"
        lines += ["", label, "", " " * width + "  ".join(name.rjust(6) for name in names)]
        for system in systems:
            values = [each["means"][system][measure] for each in evaluations]
            cells = [*values, sum(values) / len(values)]
            row = "  ".join(f"{value:.4f}".rjust(max(6, len(name))) for value, name in zip(cells, names, strict=True))
            lines.append(system.ljust(width) + row)
    return lines
