"""What `raytriever sweep` shows: lines for a terminal, and a page with the table and plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from raytriever.artifacts.artifact import to_strict_json
from raytriever.artifacts.storage import Folder
from raytriever.reports.plots import BLUE, GREY, INK, ORANGE, shown, svg_of
from raytriever.reports.progress import format_seconds
from raytriever.reports.report import Block, Details, Plot, Section, render
from raytriever.reports.table import Cell, Table, counted
from raytriever.sweep.grid import short_keys
from raytriever.sweep.results import Column, Result, Row, Spread, best_row, rows_of

# Plots of a sweep: curves over one swept value, maps over two, dots where there are more.

_STYLES = ((BLUE, "-"), (ORANGE, "-"), (INK, "-"), (BLUE, "--"), (ORANGE, "--"), (GREY, "-"))
_MOST_TICKS = 12
_LOGARITHMIC_FROM = 100  # a scale for values whose largest is so many times their smallest

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ticks:
    """The values of a swept key: where they stand, on what scale, and what they are called."""

    label: str
    names: Sequence[str]

    @property
    def numbers(self) -> list[float] | None:
        """The values as finite numbers, or None where one is none."""
        try:
            numbers = [float(name) for name in self.names]
        except ValueError:
            return None
        return numbers if all(map(math.isfinite, numbers)) else None

    @property
    def is_logarithmic(self) -> bool:
        """Whether the numbers are read better by their logarithm."""
        numbers = self.numbers
        return numbers is not None and min(numbers) > 0 and max(numbers) >= _LOGARITHMIC_FROM * min(numbers)

    def places(self) -> Array:
        """(n,): the numbers, or 0, 1, 2, …"""
        numbers = self.numbers
        return np.arange(len(self.names), dtype=np.float64) if numbers is None else np.array(numbers)

    def draw(self, axes: Axes) -> None:
        """Labels the x axis."""
        axes.set_xlabel(shown(self.label, 60))
        if self.is_logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda *_: "")
        elif self.numbers is None:
            axes.set_xticks(self.places(), [shown(name, 16) for name in self.names])
            axes.set_xlim(-0.5, len(self.names) - 0.5)
        elif len(self.names) <= _MOST_TICKS:
            axes.set_xticks(self.places(), [f"{number:g}" for number in self.places()])


@dataclass(frozen=True)
class Line:
    """Means (n,) over the ticks, not a number where nothing finished, and their deviations (n,), if any."""

    name: str
    means: Array
    deviations: Array | None = None


def sweep_curves(ticks: Ticks, panels: Mapping[str, Sequence[Line]], description: str) -> str:
    """A panel for each measure: a line for each evaluation, bars of ± one deviation, a large dot at each maximum."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (measure, lines) in zip(grid, panels.items(), strict=False):
            for line, (color, style) in zip(lines, _STYLES * len(lines), strict=False):
                _draw_line(axes, ticks, line, color, style)
            ticks.draw(axes)
            axes.set_title(shown(measure))
            axes.grid()
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines))
        for axes in grid[len(panels) :]:
            axes.set_visible(False)

    return svg_of(draw, 2.6 * rows, description)


def _draw_line(axes: Axes, ticks: Ticks, line: Line, color: str, style: str) -> None:
    order = np.argsort(ticks.places(), kind="stable")
    order = order[np.isfinite(line.means[order])]
    if not len(order):
        return
    x, y = ticks.places()[order], line.means[order]
    joined = style if ticks.numbers is not None else "none"  # nothing lies between names
    axes.plot(x, y, color=color, linestyle=joined, linewidth=1.6, marker="o", markersize=3.5, label=shown(line.name))
    if line.deviations is not None:
        axes.errorbar(x, y, yerr=line.deviations[order], fmt="none", ecolor=color, elinewidth=1, capsize=2.5, alpha=0.7)
    best = int(np.argmax(y))
    axes.plot(x[best], y[best], "o", color=color, markersize=8)


def sweep_map(across: Ticks, down: Ticks, means: Array, measure: str, description: str) -> str:
    """Cells of ``means`` (rows of ``down``, columns of ``across``), darker for higher; the highest has a frame."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        edges = [np.arange(size + 1) - 0.5 for size in means.shape[::-1]]
        axes.pcolormesh(*edges, np.ma.masked_invalid(means), cmap="Blues", edgecolors="white", linewidth=1)
        low, high = np.nanmin(means), np.nanmax(means)
        for (row, column), value in np.ndenumerate(means):
            text = "failed" if math.isnan(value) else f"{value:.4f}"
            is_dark = high > low and (value - low) / (high - low) > 0.6
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if is_dark else INK)
        row, column = divmod(int(np.nanargmax(means)), means.shape[1])
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=ORANGE, linewidth=2.2))
        axes.set_xticks(range(len(across.names)), [shown(name, 16) for name in across.names])
        axes.set_yticks(range(len(down.names)), [shown(name, 16) for name in down.names])
        axes.set_xlabel(shown(across.label, 60))
        axes.set_ylabel(shown(down.label, 40))
        axes.set_title(shown(measure))
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.invert_yaxis()

    return svg_of(draw, 0.36 * len(down.names) + 1.3, description)


def sweep_dots(axes_of: Sequence[Ticks], means: Array, measure: str, description: str) -> str:
    """A panel for each swept key, in which every setting is a dot at its value and its mean (n,); the best is large."""
    columns = min(3, len(axes_of))
    rows = -(-len(axes_of) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        best = int(np.nanargmax(means))
        for axes, ticks in zip(grid, axes_of, strict=False):
            names = list(dict.fromkeys(ticks.names))
            places = dict(zip(names, Ticks(ticks.label, names).places(), strict=True))
            x = np.array([places[name] for name in ticks.names])
            axes.plot(x, means, "o", color=BLUE, alpha=0.6, markersize=4, markeredgewidth=0)
            axes.plot(x[best], means[best], "o", color=ORANGE, markersize=8)
            Ticks(ticks.label, names).draw(axes)
            axes.grid()
        for axes in grid[len(axes_of) :]:
            axes.set_visible(False)
        for first in range(0, len(axes_of), columns):
            grid[first].set_ylabel(shown(measure))

    return svg_of(draw, 2.4 * rows, description)


SWEEP_JSON, SWEEP_HTML = "sweep.json", "sweep.html"


@dataclass(frozen=True)
class SweepResult:
    """A whole sweep: what was asked for (``settings``, plain JSON), what is compared and what came out.

    ``keys``: the swept ones without ``seed_key``; ``test_split``: whether anything compared is measured on a split
    called "test"; ``drawn``: whether settings were drawn at random.
    """

    recipe: str
    settings: dict[str, Any]
    keys: Sequence[str]
    seed_key: str | None
    drawn: bool
    columns: Sequence[Column]
    results: Sequence[Result]
    test_split: bool

    @property
    def rows(self) -> list[Row]:
        """One a setting."""
        return rows_of(self.results, self.seed_key)

    @property
    def failed(self) -> list[Result]:
        """Trials without a result."""
        return [result for result in self.results if result.failure]

    def title(self, column: Column) -> str:
        """The measure, and of which evaluation where there are several."""
        several = len({other.evaluation for other in self.columns}) > 1
        return f"{column.evaluation}: {column.measure}" if several else column.measure

    def systems(self) -> str:
        """Whose measures they are."""
        return ", ".join(f"'{system}'" for system in dict.fromkeys(column.system for column in self.columns))


def sweep_lines(swept: SweepResult) -> list[str]:
    """The table, what failed, and what to keep in mind. Columns that don't fit beside the others go below."""
    table = _table(swept)
    lines = ["", f"{_counts(swept)}; measures of {swept.systems()}", ""]
    lines += table.lines(repeated=len(swept.keys) + bool(swept.seed_key))
    notes = ["* highest"] * any(cell.is_strong for row in table.rows for cell in row if isinstance(cell, Cell))
    notes += ["mean ± standard deviation over the seeds"] * bool(swept.seed_key)
    lines += ["", "; ".join(notes)]
    lines += [f"{result.name} failed: {result.failure.reason}" for result in swept.results if result.failure]
    return [*lines, *([_TEST_SPLIT] if _chooses_on_test(swept) else [])]


_TEST_SPLIT = "Measured on the test split: a setting chosen by this table needs other queries for its final figure."


def _chooses_on_test(swept: SweepResult) -> bool:
    return swept.test_split and len(swept.rows) > 1


def _counts(swept: SweepResult) -> str:
    settings, trials = len(swept.rows), len(swept.results)
    parts = [counted(settings, "setting")] + ([counted(trials, "trial")] if swept.seed_key else [])
    failed = f", {len(swept.failed)} failed" if swept.failed else ""
    return f"{swept.recipe}: {', '.join(parts)}{failed}"


def _table(swept: SweepResult, caption: str = "") -> Table:
    """A row for each setting; the highest of each measure is strong."""
    rows, short = swept.rows, short_keys([*swept.keys, *([swept.seed_key] if swept.seed_key else [])])
    facts = {"examples": "examples", "training_seconds": "training", "seconds": "total"}
    facts = {fact: head for fact, head in facts.items() if any(row.mean_of(fact) is not None for row in rows)}
    highest = [max((s.mean for row in rows if (s := row.spread(c))), default=None) for c in swept.columns]
    header = [short[key] for key in swept.keys] + (["seeds"] if swept.seed_key else [])
    header += [swept.title(column) for column in swept.columns] + list(facts.values())
    cells = []
    for row in rows:
        of_row = [Cell(row.values[key]) for key in swept.keys]
        if swept.seed_key:
            done, total = len(row.finished), len(row.results)
            of_row.append(Cell(f"{total}" if done == total else f"{done} of {total}"))
        spreads = [row.spread(column) for column in swept.columns]
        of_row += [
            Cell(_shown(spread), is_strong=spread is not None and spread.mean == mean and len(rows) > 1)
            for spread, mean in zip(spreads, highest, strict=True)
        ]
        cells.append(of_row + [Cell(_fact(fact, row.mean_of(fact))) for fact in facts])
    return Table(header, cells, caption, text_columns=len(swept.keys))


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "failed"
    return f"{spread.mean:.4f}" + ("" if spread.deviation is None else f" ± {spread.deviation:.4f}")


def _fact(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if name == "examples" else format_seconds(value)


def write_sweep(swept: SweepResult, uri: str) -> list[str]:
    """Writes ``sweep.html`` and ``sweep.json`` into a folder; says where."""
    folder = Folder(uri)
    subtitle = f"Raytriever sweep · {_counts(swept)}"
    folder.write_bytes(SWEEP_HTML, render(f"Sweep of {swept.recipe}", subtitle, [sweep_section(swept)]).encode())
    folder.write_bytes(SWEEP_JSON, to_strict_json(sweep_json(swept)))
    return [folder.describe(name) for name in (SWEEP_HTML, SWEEP_JSON)]


def sweep_json(swept: SweepResult) -> dict[str, Any]:
    """Everything that the page shows, and each trial by itself."""
    rows = [
        {
            "values": row.values,
            "seeds_finished": len(row.finished),
            "measures": [_spread_json(column, row.spread(column)) for column in swept.columns],
        }
        for row in swept.rows
    ]
    trials = [
        {
            "name": result.name,
            "values": result.values,
            "measures": [_column_json(column) | {"value": value} for column, value in result.measures.items()],
            "examples": result.examples,
            "training_seconds": result.training_seconds,
            "seconds": result.seconds,
            "error": result.failure and result.failure.reason,
        }
        for result in swept.results
    ]
    return {"recipe": swept.recipe, "settings": swept.settings, "rows": rows, "trials": trials}


def _column_json(column: Column) -> dict[str, Any]:
    return {"evaluation": column.evaluation, "system": column.system, "measure": column.measure}


def _spread_json(column: Column, spread: Spread | None) -> dict[str, Any]:
    values = {"mean": None, "standard_deviation": None}
    return _column_json(column) | ({"mean": spread.mean, "standard_deviation": spread.deviation} if spread else values)


def sweep_section(swept: SweepResult) -> Section:
    """Plots, the table, each seed's trial, failures and the command's settings."""
    over_seeds = " Mean ± standard deviation (n - 1) over the seeds." if swept.seed_key else ""
    times = (
        " Training: the sum of its steps; total: all stages that the values change, with their start. Where a trial was"
        " cut off and went on, total counts the last attempt alone, training all of them."
    )
    caption = f"Measures of {swept.systems()}; the highest is bold.{over_seeds}{times}"
    blocks: list[Block] = [*_plots(swept), _table(swept, caption)]
    if _chooses_on_test(swept):
        blocks.append(_TEST_SPLIT)
    if swept.seed_key:
        blocks.append(Details("Every trial", _trials_table(swept)))
    for result in swept.failed:
        assert result.failure is not None
        details = "\n\n".join(filter(None, [result.failure.reason, result.failure.trace]))
        blocks.append(Details(f"{result.name} failed", details))
    settings = "\n".join(f"{key}: {value}" for key, value in swept.settings.items())
    return Section("Result", _lead(swept), [*blocks, Details("What was asked for", settings)])


def _lead(swept: SweepResult) -> str:
    rows, column = swept.rows, swept.columns[0]
    best = best_row(rows, column)
    if best is None:
        return "No trial finished."
    spread = rows[best].spread(column)
    measured = f"{column.measure} of '{column.system}' in {column.evaluation}"
    if len(rows) == 1:
        return f"{measured} is {_shown(spread)} over {counted(len(rows[best].finished), 'seed')}."
    short = short_keys(swept.keys)
    named = ", ".join(f"{short[key]} {value}" for key, value in rows[best].values.items())
    means = [found.mean for row in rows if (found := row.spread(column))]
    others = f"The lowest is {min(means):.4f}."
    return f"Of {len(rows)} settings, {named} has the highest {measured}: {_shown(spread)}. {others}"


def _trials_table(swept: SweepResult) -> Table:
    header = ["trial", *(swept.title(column) for column in swept.columns)]
    rows = [
        [result.name, *(f"{result.measures[c]:.4f}" if c in result.measures else "failed" for c in swept.columns)]
        for result in swept.results
    ]
    return Table(header, rows)


def _plots(swept: SweepResult) -> list[Plot]:
    """By how many keys are swept; none where there is but one setting, or nothing finished."""
    rows = swept.rows
    columns = [column for column in swept.columns if best_row(rows, column) is not None]
    if len(rows) < 2 or not columns:
        return []
    ticks = [Ticks(key, [row.values[key] for row in rows]) for key in swept.keys]
    if len(ticks) == 1:
        return [_curves(swept, ticks[0], columns)]
    plots = []
    for column in columns:
        means = _means(rows, column)
        title = f"{swept.title(column)} of '{column.system}'"
        if len(ticks) == 2 and not swept.drawn:
            down, across = (Ticks(tick.label, list(dict.fromkeys(tick.names))) for tick in ticks)
            cells = means.reshape(len(down.names), len(across.names))
            plots.append(Plot(sweep_map(across, down, cells, title, f"Map of {title}"), "The framed cell is highest."))
        else:
            caption = "Each dot is a setting, shown once for each swept value; the large one is highest."
            plots.append(Plot(sweep_dots(ticks, means, title, f"Dots of {title}"), caption))
    return plots


def _curves(swept: SweepResult, ticks: Ticks, columns: Sequence[Column]) -> Plot:
    rows = swept.rows
    panels: dict[str, list[Line]] = {}
    for column in columns:
        spreads = [row.spread(column) for row in rows]
        deviations = np.array([(s and s.deviation) or 0.0 for s in spreads]) if swept.seed_key else None
        panels.setdefault(column.measure, []).append(Line(column.evaluation, _means(rows, column), deviations))
    bars = " Bars: ± one standard deviation over the seeds." if swept.seed_key else ""
    caption = f"Large dots: the highest of each line.{bars}"
    return Plot(sweep_curves(ticks, panels, f"Measures by {ticks.label}"), caption)


def _means(rows: Sequence[Row], column: Column) -> Any:
    return np.array([s.mean if (s := row.spread(column)) else np.nan for row in rows])
