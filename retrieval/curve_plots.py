"""Plots of what changes over training steps: panels of curves, of shares that fill a whole, of evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from raytriever.retrieval.plots import BLUE, GREY, INK, ORANGE, shown, svg_of

_MOST_POINTS = 400  # of a curve; beyond it, a point is a mean
_COLORS = (BLUE, ORANGE, INK, GREY)
_FIRST_TO_LAST = LinearSegmentedColormap.from_list("first to last", ["#e4ebf1", "#7ba3c9", BLUE, "#0f2b47"])


@dataclass(frozen=True)
class Curve:
    """Values (n,) over steps (n,) under a name."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """One or more curves in one pair of axes; of several, their running means only, told apart by a legend.

    ``smoothed``: a point for every step and a running mean; else a line through all points. ``stacked``: shares of a
    whole, one on top of the other, from the first to the last. ``marked``: the step of the one curve's point that is
    set off; ``dots``: a dot at every point of a line that is not smoothed.
    """

    title: str
    curves: Sequence[Curve]
    smoothed: bool = True
    stacked: bool = False
    marked: int | None = None
    dots: bool = False


def curve_panels(panels: Sequence[Panel], description: str, boundaries: Sequence[float] = ()) -> str:
    """Two panels beside each other; ``boundaries``: steps at which an epoch ends."""
    rows = -(-len(panels) // 2)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, 2, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
            for boundary in boundaries:
                axes.axvline(boundary, color=GREY, linewidth=0.8, linestyle=":")
        for axes in grid[len(panels) :]:
            axes.set_visible(False)

    return svg_of(draw, 1.95 * rows, description)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.stacked:
        _draw_shares(axes, panel.curves)
    elif len(panel.curves) == 1:
        _draw_curve(axes, panel.curves[0], panel)
    else:
        _draw_curves(axes, panel)
    axes.set_title(shown(panel.title))
    axes.set_xlabel("step")
    axes.grid()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_curve(axes: Axes, curve: Curve, panel: Panel) -> None:
    x, y = thin(curve.steps.astype(np.float64)), thin(curve.values)
    if panel.smoothed:
        axes.plot(x, y, "o", color=BLUE, alpha=0.35, markersize=3, markeredgewidth=0)
        axes.plot(steps_of_mean(x, y), running_mean(y), color=BLUE, linewidth=1.6)
    else:
        axes.plot(x, y, "o-" if panel.dots else "-", color=BLUE, linewidth=1.6, markersize=3.5)
    for place in np.flatnonzero(curve.steps == panel.marked):
        value = curve.values[place]
        axes.plot(curve.steps[place], value, "o", color=ORANGE, markersize=7)
        axes.axhline(value, color=ORANGE, linewidth=0.8, linestyle="--", zorder=0)


def _draw_curves(axes: Axes, panel: Panel) -> None:
    for number, curve in enumerate(panel.curves):
        x, y = thin(curve.steps.astype(np.float64)), thin(curve.values)
        if panel.smoothed:
            x, y = steps_of_mean(x, y), running_mean(y)
        color = _COLORS[number % len(_COLORS)]
        axes.plot(x, y, color=color, linewidth=1.6, label=shown(curve.name, 20))
    _legend(axes)


def _draw_shares(axes: Axes, curves: Sequence[Curve]) -> None:
    x = thin(curves[0].steps.astype(np.float64))
    smoothed = [thin(curve.values) for curve in curves]
    colors = _FIRST_TO_LAST(np.linspace(0, 1, len(curves)))
    names = [shown(curve.name, 20) for curve in curves]
    means = [running_mean(values) for values in smoothed]
    axes.stackplot(steps_of_mean(x, x), means, labels=names, colors=colors, edgecolor="white", linewidth=0.5)
    axes.set_ylim(0, max(1.0, float(np.max(np.sum(means, axis=0)))))
    axes.margins(x=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Beside the axes, in the order in which curves that are stacked lie."""
    handles, names = axes.get_legend_handles_labels()
    small = 8.5 if len(names) <= 6 else 6.5
    axes.legend(
        handles[::-1],
        names[::-1],
        frameon=False,
        fontsize=small,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        handlelength=1.2,
        labelspacing=0.35,
        borderaxespad=0.3,
    )


def running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a window of a tenth of the points (an odd number of them), only where the window is full."""
    window = mean_window(len(values))
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def steps_of_mean(steps: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The middle of each window of ``running_mean``."""
    half = mean_window(len(values)) // 2
    return steps[half : len(steps) - half]


def mean_window(points: int) -> int:
    """An odd number of points, about a tenth of them."""
    return max(1, points // 10 // 2 * 2 + 1)


def thin(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """At most 400 values: means of consecutive runs of about equal length."""
    if len(values) <= _MOST_POINTS:
        return values
    return np.array([piece.mean() for piece in np.array_split(values, _MOST_POINTS)])
