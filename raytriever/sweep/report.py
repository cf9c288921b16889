"""What `raytriever sweep` shows: lines for a terminal, and a page with the table and plots."""

from dataclasses import asdict
from typing import Any

import numpy as np

from raytriever.artifacts.artifact import to_strict_json
from raytriever.artifacts.storage import Folder
from raytriever.reports.plots import SettingPanel, setting_panels
from raytriever.reports.progress import format_seconds
from raytriever.reports.report import TEST_SPLIT, Block, Details, Plot, Section, render
from raytriever.reports.table import Cell, Table, counted
from raytriever.sweep.plan import short_keys
from raytriever.sweep.results import Spread, SweepResult

SWEEP_JSON, SWEEP_HTML = "sweep.json", "sweep.html"


def sweep_lines(swept: SweepResult) -> list[str]:
    """The table, what failed, and what to keep in mind. Columns that don't fit beside the others go below."""
    table = _table(swept)
    lines = ["", f"{_counts(swept)}; measures of {swept.systems()}", ""]
    lines += table.lines(repeated=len(swept.keys) + bool(swept.seed_key))
    notes = ["* highest"] * any(cell.is_strong for row in table.rows for cell in row if isinstance(cell, Cell))
    notes += ["mean ± standard deviation over the seeds"] * bool(swept.seed_key)
    lines += ["", "; ".join(notes)]
    lines += [f"{result.name} failed: {result.failure}" for result in swept.failed]
    return [*lines, *([TEST_SPLIT] if _chooses_on_test(swept) else [])]


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
    """Each trial by itself."""
    trials = [
        {
            "name": result.name,
            "values": result.values,
            "measures": [asdict(column) | {"value": value} for column, value in result.measures.items()],
            "seconds": result.seconds,
            "error": result.failure,
        }
        for result in swept.results
    ]
    return {"recipe": swept.recipe, "settings": swept.settings, "trials": trials}


def sweep_section(swept: SweepResult) -> Section:
    """Plots, the table, failures and the command's settings."""
    over_seeds = " Mean ± standard deviation (n - 1) over the seeds." if swept.seed_key else ""
    times = "Time: all stages that the values change. A resumed stage counts its last attempt alone."
    caption = f"Measures of {swept.systems()}; the highest is bold.{over_seeds} {times}"
    blocks: list[Block] = [*_plots(swept), _table(swept, caption)]
    if _chooses_on_test(swept):
        blocks.append(TEST_SPLIT)
    blocks += [f"{result.name} failed: {result.failure}" for result in swept.failed]
    settings = "\n".join(f"{key}: {value}" for key, value in swept.settings.items())
    return Section("Result", _counts(swept), [*blocks, Details("What was asked for", settings)])


def _plots(swept: SweepResult) -> list[Plot]:
    """One for each measure. None for a single setting, or if nothing finished."""
    rows, keys = swept.rows, swept.keys
    if len(rows) < 2 or not any(row.finished for row in rows):
        return []
    bars = " Bars: ± one standard deviation over the seeds." if swept.seed_key else ""
    caption = f"Each dot is a setting; the large one is highest.{bars}"
    plots = []
    for column in swept.columns:
        spreads = [row.spread(column) for row in rows]
        means = np.array([spread.mean if spread else np.nan for spread in spreads])
        deviations = np.array([(spread and spread.deviation) or 0.0 for spread in spreads])
        title = swept.title(column)
        panels = [
            SettingPanel(title, key, [row.values[key] for row in rows], means, deviations, len(keys) == 1)
            for key in keys
        ]
        plots.append(Plot(setting_panels(panels, f"{title} of '{column.system}'"), caption))
    return plots
