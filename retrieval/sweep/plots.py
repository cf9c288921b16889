"""Plots of a sweep: curves over one swept value, maps over two, dots where there are more."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from raytriever.retrieval.plots import BLUE, GREY, INK, ORANGE, shown, svg_of

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
