"""What `raytriever sweep` shows: lines for a terminal, and a page with the table and plots."""

from dataclasses import asdict
from typing import Any

import numpy as np

from raytriever.artifacts.artifact import to_strict_json
from raytriever.artifacts.storage import Folder
from raytriever.reports.plots import SettingPanel, setting_panels
from raytriever.reports.progress import format_seconds
from raytriever.reports.report import Block, Details, Plot, Section, render
from raytriever.reports.table import Cell, Table, counted
from raytriever.sweep.plan import short_keys
from raytriever.sweep.results import Column, Spread, SweepResult, best_row

SWEEP_JSON, SWEEP_HTML = "sweep.json", "sweep.html"
_TEST_SPLIT = "Measured on the test split. Report the final figure of the setting that you choose on other queries."


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
    highest = [max((s.mean for row in rows if (s := row.spread(c))), default=None) for c in swept.columns]
    header = [short[key] for key in swept.keys] + (["seeds"] if swept.seed_key else [])
    header += [swept.title(column) for column in swept.columns] + ["time"]
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
        cells.append([*of_row, Cell("" if row.seconds is None else format_seconds(row.seconds))])
    return Table(header, cells, caption, text_columns=len(swept.keys))


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "failed"
    return f"{spread.mean:.4f}" + ("" if spread.deviation is None else f" ± {spread.deviation:.4f}")


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
            "measures": [_measured(column, row.spread(column)) for column in swept.columns],
        }
        for row in swept.rows
    ]
    trials = [
        {
            "name": result.name,
            "values": result.values,
            "measures": [asdict(column) | {"value": value} for column, value in result.measures.items()],
            "seconds": result.seconds,
            "error": result.failure and result.failure.reason,
        }
        for result in swept.results
    ]
    return {"recipe": swept.recipe, "settings": swept.settings, "rows": rows, "trials": trials}


def _measured(column: Column, spread: Spread | None) -> dict[str, Any]:
    mean, deviation = (spread.mean, spread.deviation) if spread else (None, None)
    return asdict(column) | {"mean": mean, "standard_deviation": deviation}


def sweep_section(swept: SweepResult) -> Section:
    """Plots, the table, failures and the command's settings."""
    over_seeds = " Mean ± standard deviation (n - 1) over the seeds." if swept.seed_key else ""
    times = "Time: all stages that the values change. A resumed stage counts its last attempt alone."
    caption = f"Measures of {swept.systems()}; the highest is bold.{over_seeds} {times}"
    blocks: list[Block] = [*_plots(swept), _table(swept, caption)]
    if _chooses_on_test(swept):
        blocks.append(_TEST_SPLIT)
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


def _plots(swept: SweepResult) -> list[Plot]:
    """Plots by the number of swept keys. None for a single setting, or if nothing finished."""
    rows, keys = swept.rows, swept.keys
    columns = [column for column in swept.columns if best_row(rows, column) is not None]
    if len(rows) < 2 or not columns:
        return []
    names = {key: [row.values[key] for row in rows] for key in keys}
    panels: dict[Column, list[SettingPanel]] = {}
    for column in columns:
        spreads = [row.spread(column) for row in rows]
        means = np.array([spread.mean if spread else np.nan for spread in spreads])
        deviations = np.array([(spread and spread.deviation) or 0.0 for spread in spreads])
        title = swept.title(column)
        panels[column] = [SettingPanel(title, key, names[key], means, deviations, len(keys) == 1) for key in keys]
    bars = " Bars: ± one standard deviation over the seeds." if swept.seed_key else ""
    caption = f"Each dot is a setting; the large one is highest.{bars}"
    if len(keys) == 1:
        return [Plot(setting_panels([panel for (panel,) in panels.values()], f"Measures by {keys[0]}"), caption)]
    return [
        Plot(setting_panels(of_column, f"{swept.title(column)} of '{column.system}'"), caption)
        for column, of_column in panels.items()
    ]
