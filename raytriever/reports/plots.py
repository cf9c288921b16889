"""Plots as inline SVG: one look for all, text that stays text, the same bytes for the same numbers."""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytriever.reports.table import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1c2630"
GREY = "#9aa5ae"
BLUE = "#1f5a94"
ORANGE = "#c8642b"

_WIDTH = 9.6  # inches; the page is as wide
_MOST_POINTS = 400  # of a curve; beyond it, a point is a mean
_WIDE_PANELS = 3  # beside each other; more of them are narrow
_LONGEST_TICK = 24  # of a name, whose end tells models apart
_LOGARITHMIC_FROM = 100  # the scale is logarithmic if the largest value is so many times the smallest

_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "figure.constrained_layout.w_pad": 0.08,
    "grid.color": "#e3e8eb",
    "grid.linewidth": 0.8,
}


@dataclass(frozen=True)
class Interval:
    """A value and the interval around it."""

    name: str
    value: float
    low: float
    high: float
    is_significant: bool


@dataclass(frozen=True)
class Panel:
    """Values (n,) over steps (n,) in axes of their own.

    ``smoothed`` draws a point for every step and a running mean; otherwise a line joins all points. ``marked`` is the
    step of a highlighted point. ``dots`` draws a dot at every point of a line that is not smoothed.
    """

    title: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    smoothed: bool = True
    marked: int | None = None
    dots: bool = False


@dataclass(frozen=True)
class SettingPanel:
    """Settings of a sweep: ``names`` (n,) are their values of ``key``; of ``measure`` means and deviations (n,).

    A mean is not a number where nothing finished. ``joined``: by a line, where the values are numbers.
    """

    measure: str
    key: str
    names: Sequence[str]
    means: NDArray[np.float64]
    deviations: NDArray[np.float64]
    joined: bool = False


def interval_panels(panels: Mapping[str, Sequence[Interval]], label: str, description: str) -> str:
    """For each measure a panel: dots with their intervals and a line at 0; hollow dots are not significant."""
    from matplotlib.ticker import MaxNLocator

    def draw(figure: "Figure") -> None:
        row_of_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, intervals) in zip(row_of_axes, panels.items(), strict=True):
            axes.axvline(0, color=INK, linewidth=0.8)
            for row, interval in enumerate(reversed(intervals)):
                axes.plot([interval.low, interval.high], [row, row], color=BLUE, linewidth=1.8)
                face = BLUE if interval.is_significant else "white"
                axes.plot(interval.value, row, "o", color=BLUE, markerfacecolor=face, markersize=6.5)
            axes.set_yticks(range(len(intervals)), [shown(interval.name) for interval in reversed(intervals)])
            axes.set_ylim(-0.6, len(intervals) - 0.4)
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            axes.grid(axis="x")
            axes.xaxis.set_major_locator(MaxNLocator(5 if len(panels) <= _WIDE_PANELS else 2))
            axes.set_title(shown(title, 40 if len(panels) <= _WIDE_PANELS else 14))
        figure.supxlabel(shown(label, 70), fontsize="medium")

    tallest = max(len(intervals) for intervals in panels.values())
    return svg_of(draw, 0.34 * tallest + 1.1, description)


def curve_panels(panels: Sequence[Panel], description: str, boundaries: Sequence[float] = ()) -> str:
    """Two panels beside each other. ``boundaries`` are the last steps of epochs."""
    draw = partial(_draw_panel, boundaries=boundaries)
    return _panel_grid(draw, panels, columns=2, height=1.95, description=description)


def _panel_grid(
    draw: "Callable[[Axes, Any], None]", panels: Sequence[Any], *, columns: int, height: float, description: str
) -> str:
    """``height``: of a row, in inches."""
    rows = -(-len(panels) // columns)

    def draw_all(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            draw(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)

    return svg_of(draw_all, height * rows, description)


def _draw_panel(axes: "Axes", panel: Panel, boundaries: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    for boundary in boundaries:
        axes.axvline(boundary, color=GREY, linewidth=0.8, linestyle=":")
    x, y = thin(panel.steps.astype(np.float64)), thin(panel.values)
    if panel.smoothed:
        axes.plot(x, y, "o", color=BLUE, alpha=0.35, markersize=3, markeredgewidth=0)
        axes.plot(running_mean(x), running_mean(y), color=BLUE, linewidth=1.6)
    else:
        axes.plot(x, y, "o-" if panel.dots else "-", color=BLUE, linewidth=1.6, markersize=3.5)
    for place in np.flatnonzero(panel.steps == panel.marked):
        value = panel.values[place]
        axes.plot(panel.steps[place], value, "o", color=ORANGE, markersize=7)
        axes.axhline(value, color=ORANGE, linewidth=0.8, linestyle="--", zorder=0)
    axes.set_title(shown(panel.title))
    axes.set_xlabel("step")
    axes.grid()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def heat_map(values: NDArray[np.float32], left_out: NDArray[np.bool_], description: str) -> str:
    """A matrix (n, m), its first row on top. Larger values are darker. Cells that are left out are orange."""
    import matplotlib as mpl

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        colours = mpl.colormaps["Blues"].with_extremes(bad=ORANGE)
        image = axes.imshow(np.ma.masked_array(values, left_out), cmap=colours, interpolation="nearest")
        figure.colorbar(image, ax=axes, shrink=0.7)

    return svg_of(draw, 0.8 * _WIDTH * min(1, len(values) / values.shape[1]) + 0.4, description)


def running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a window of a tenth of the points (an odd number of them), only where the window is full."""
    window = max(1, len(values) // 10 // 2 * 2 + 1)
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def thin(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """At most 400 values: means of consecutive runs of about equal length."""
    if len(values) <= _MOST_POINTS:
        return values
    return np.array([piece.mean() for piece in np.array_split(values, _MOST_POINTS)])


def setting_panels(panels: Sequence[SettingPanel], description: str) -> str:
    """Panels beside each other: every setting is a dot with a bar of ± one deviation, the highest a large one."""
    return _panel_grid(_draw_settings, panels, columns=min(2, len(panels)), height=2.6, description=description)


def _draw_settings(axes: "Axes", panel: SettingPanel) -> None:
    numbers = _numbers(panel.names)
    if numbers is None:
        names = list(dict.fromkeys(panel.names))
        places = np.array([names.index(name) for name in panel.names])
        ends = [name if len(name) <= _LONGEST_TICK else f"…{name[-_LONGEST_TICK:]}" for name in names]
        axes.set_xticks(range(len(names)), [shown(name) for name in ends], rotation=30, ha="right")
    else:
        places = numbers
        if numbers.min() > 0 and numbers.max() >= _LOGARITHMIC_FROM * numbers.min():
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(lambda *_: "")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    order = np.argsort(places, kind="stable")
    order = order[np.isfinite(panel.means[order])]
    x, y = places[order], panel.means[order]
    style = "o-" if panel.joined and numbers is not None else "o"  # nothing lies between names
    axes.errorbar(x, y, yerr=panel.deviations[order], fmt=style, color=BLUE, markersize=4, linewidth=1.4, capsize=2.5)
    axes.plot(x[y.argmax()], y.max(), "o", color=ORANGE, markersize=8, zorder=3)
    axes.set_title(shown(panel.measure))
    axes.set_xlabel(shown(panel.key, 60))
    axes.grid()


def _numbers(names: Sequence[str]) -> NDArray[np.float64] | None:
    """The values as finite numbers (n,), or None where one is none."""
    try:
        numbers = np.array([float(name) for name in names])
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def shown(text: str, longest: int = 40) -> str:
    """A name as a plot shows it: on one line, not too long."""
    line = re.sub(r"\s+", " ", printable(text))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def svg_of(draw: "Callable[[Figure], None]", height: float, description: str) -> str:
    """An ``<svg>`` element with unique ids, and a ``description`` for those who can't see it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's fonts draw the text
        mpl.rcdefaults()  # whatever the user's matplotlibrc says
        mpl.rcParams.update(_LOOK)
        mpl.rcParams["svg.hashsalt"] = description  # ids are a plot's own
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return _inline(buffer.getvalue(), description)


def _inline(document: str, description: str) -> str:
    """The part of matplotlib's file for a page: no prologue, no xlink, no style of its own."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href=", "href=")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names of groups: nothing refers to them
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    label = escape(printable(description))
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
