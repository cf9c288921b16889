"""What `raytriever sweep` shows: lines for a terminal, and a page with the table and plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytriever.retrieval.evaluation.systems import strict_json
from raytriever.retrieval.plain_text import aligned, counted
from raytriever.retrieval.progress import format_seconds
from raytriever.retrieval.report import Block, Cell, Details, Plot, Section, Table, render
from raytriever.retrieval.storage import Folder
from raytriever.retrieval.sweep.grid import short_keys
from raytriever.retrieval.sweep.plots import Line, Ticks, sweep_curves, sweep_dots, sweep_map
from raytriever.retrieval.sweep.results import Column, Result, Row, Spread, best_row, rows_of

SWEEP_JSON, SWEEP_HTML = "sweep.json", "sweep.html"
_COLUMNS = 100  # of a terminal


@dataclass(frozen=True)
class Swept:
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


def sweep_lines(swept: Swept) -> list[str]:
    """The table, what failed, and what to keep in mind. Columns that don't fit beside the others go below."""
    header, rows = _cells(swept)
    columns = [_column(head, [row[number] for row in rows]) for number, head in enumerate(header)]
    settings = len(swept.keys) + bool(swept.seed_key)
    lines = ["", f"{_counts(swept)}; measures of {swept.systems()}"]
    for shown in _side_by_side(columns[:settings], columns[settings:]):
        lines += ["", *aligned(list(zip(*shown, strict=True)), ">" * len(shown))]
    notes = ["* highest"] * any(cell.is_strong for row in rows for cell in row)
    notes += ["mean ± standard deviation over the seeds"] * bool(swept.seed_key)
    lines += ["", "; ".join(notes)]
    lines += [f"{result.name} failed: {result.failure.reason}" for result in swept.results if result.failure]
    return [*lines, *([_TEST_SPLIT] if _chooses_on_test(swept) else [])]


def _column(head: str, cells: Sequence[Cell]) -> list[str]:
    """Its lines; where one has a mark, the others keep room for it, so that numbers stand below one another."""
    room = "  " if any(cell.is_strong for cell in cells) else ""
    return [head + room, *(cell.text + (" *" if cell.is_strong else room) for cell in cells)]


def _side_by_side(first: list[list[str]], others: list[list[str]]) -> list[list[list[str]]]:
    """The ``others`` in tables that fit a terminal, ``first`` in front of each."""
    tables = [list(first)]
    for column in others:
        width = sum(2 + max(map(len, shown)) for shown in [*tables[-1], column])
        if width > _COLUMNS and len(tables[-1]) > len(first):
            tables.append(list(first))
        tables[-1].append(column)
    return tables


_TEST_SPLIT = "Measured on the test split: a setting chosen by this table needs other queries for its final figure."


def _chooses_on_test(swept: Swept) -> bool:
    return swept.test_split and len(swept.rows) > 1


def _counts(swept: Swept) -> str:
    settings, trials = len(swept.rows), len(swept.results)
    parts = [counted(settings, "setting")] + ([counted(trials, "trial")] if swept.seed_key else [])
    failed = f", {len(swept.failed)} failed" if swept.failed else ""
    return f"{swept.recipe}: {', '.join(parts)}{failed}"


def _cells(swept: Swept) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows of the table; the highest of each measure is strong."""
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
    return header, cells


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "failed"
    return f"{spread.mean:.4f}" + ("" if spread.deviation is None else f" ± {spread.deviation:.4f}")


def _fact(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if name == "examples" else format_seconds(value)


def write_sweep(swept: Swept, uri: str) -> list[str]:
    """Writes ``sweep.html`` and ``sweep.json`` into a folder; says where."""
    folder = Folder(uri)
    subtitle = f"Raytriever sweep · {_counts(swept)}"
    folder.write_bytes(SWEEP_HTML, render(f"Sweep of {swept.recipe}", subtitle, [sweep_section(swept)]).encode())
    folder.write_bytes(SWEEP_JSON, strict_json(sweep_json(swept)))
    return [folder.describe(name) for name in (SWEEP_HTML, SWEEP_JSON)]


def sweep_json(swept: Swept) -> dict[str, Any]:
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


def sweep_section(swept: Swept) -> Section:
    """Plots, the table, each seed's trial, failures and the command's settings."""
    header, rows = _cells(swept)
    over_seeds = " Mean ± standard deviation (n - 1) over the seeds." if swept.seed_key else ""
    times = (
        " Training: the sum of its steps; total: all stages that the values change, with their start. Where a trial was"
        " cut off and went on, total counts the last attempt alone, training all of them."
    )
    caption = f"Measures of {swept.systems()}; the highest is bold.{over_seeds}{times}"
    blocks: list[Block] = [*_plots(swept), Table(header, rows, caption, text_columns=len(swept.keys))]
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


def _lead(swept: Swept) -> str:
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


def _trials_table(swept: Swept) -> Table:
    header = ["trial", *(swept.title(column) for column in swept.columns)]
    rows = [
        [result.name, *(f"{result.measures[c]:.4f}" if c in result.measures else "failed" for c in swept.columns)]
        for result in swept.results
    ]
    return Table(header, rows)


def _plots(swept: Swept) -> list[Plot]:
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


def _curves(swept: Swept, ticks: Ticks, columns: Sequence[Column]) -> Plot:
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
