"""Plots as inline SVG: one look for all, text that stays text, the same bytes for the same numbers."""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from raytriever.retrieval.report import printable

INK = "#1c2630"
GREY = "#9aa5ae"
BLUE = "#1f5a94"
ORANGE = "#c8642b"

_LINES = ((BLUE, "-"), (ORANGE, "-"), (INK, "-"), (BLUE, "--"), (ORANGE, "--"), (GREY, "-"))

_WIDTH = 9.6  # inches; the page is as wide
_ROUNDING = 1e-12  # of the largest; no bins can be told apart in less than a hundredth of it

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
class Distribution:
    """Values (n,) under a name; the ``color`` says what they are: grey for what others are compared with."""

    name: str
    values: NDArray[np.float64]
    color: str = GREY


@dataclass(frozen=True)
class Interval:
    """A value and the interval around it."""

    name: str
    value: float
    low: float
    high: float
    is_significant: bool


def ridgelines(distributions: Sequence[Distribution], label: str, description: str, *, whole: bool = False) -> str:
    """Histograms below one another over common bins, equally high, with lines at means; ``whole``: integers."""
    everything = np.concatenate([distribution.values for distribution in distributions])
    largest = max(len(distribution.values) for distribution in distributions)
    edges = _bins(everything, largest, whole=whole)
    names = [distribution.name for distribution in distributions]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, distribution in enumerate(reversed(distributions)):
            counts, _ = np.histogram(distribution.values, edges)
            heights = row + 0.82 * counts / max(int(counts.max()), 1)
            axes.stairs(heights, edges, baseline=row, fill=True, color=distribution.color, alpha=0.5, linewidth=0)
            mean = float(distribution.values.mean())
            axes.plot([mean, mean], [row, row + 0.82], color=distribution.color, linewidth=2)
            axes.text(1.01, row + 0.3, f"mean {mean:.3f}", transform=axes.get_yaxis_transform(), va="center")
            axes.axhline(row, color=INK, linewidth=0.5)
        axes.set_yticks([row + 0.3 for row in range(len(names))], [shown(name) for name in reversed(names)])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(0, len(names))
        axes.grid(axis="x")
        axes.set_xlabel(shown(label, 70))

    return svg_of(draw, 0.62 * len(distributions) + 0.6, description)


def histogram(
    values: NDArray[np.float64],
    label: str,
    counted: str,
    description: str,
    marks: Mapping[str, float] | None = None,
    *,
    whole: bool = False,
) -> str:
    """Counts of ``values``, which are ``counted`` ("clusters"); ``marks``: vertical lines; ``whole``: integers."""

    counts, edges = np.histogram(values, _bins(values, len(values), whole=whole))
    return counted_bars(edges, counts, label, counted, description, marks)


def counted_bars(
    edges: Sequence[float] | NDArray[np.float64],
    counts: Sequence[int] | NDArray[np.int64],
    label: str,
    counted: str,
    description: str,
    marks: Mapping[str, float] | None = None,
) -> str:
    """``histogram`` of what was counted before: ``counts`` (n,) between ``edges`` (n + 1,)."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.75, linewidth=0)
        for number, (name, place) in enumerate((marks or {}).items()):
            axes.axvline(place, color=ORANGE, linewidth=1.4, linestyle=("-", "--", ":")[number % 3], label=shown(name))
        if marks:
            axes.legend(frameon=False, fontsize=8.5)
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(left=min(0.0, float(edges[0])))
        axes.set_xlabel(shown(label, 70))
        axes.set_ylabel(counted)

    return svg_of(draw, 2.5, description)


def overlaid_curves(curves: Mapping[str, NDArray[np.float64]], label: str, measured: str, description: str) -> str:
    """Curves by name over 0, 1, 2, … (``label``), all in one panel; at most six."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for (name, values), (color, style) in zip(curves.items(), _LINES, strict=False):
            axes.plot(np.arange(len(values)), values, color=color, linestyle=style, linewidth=1.6, label=shown(name))
            axes.plot(len(values) - 1, values[-1], "o", color=color, markersize=4)
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
        axes.grid()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(shown(label, 70))
        axes.set_ylabel(measured)

    return svg_of(draw, 2.5, description)


def interval_panels(panels: Mapping[str, Sequence[Interval]], label: str, description: str) -> str:
    """For each measure a panel: dots with their intervals and a line at 0; hollow dots are not significant."""

    def draw(figure: Figure) -> None:
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
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.set_title(shown(title))
            axes.set_xlabel(shown(label, 70))

    tallest = max(len(intervals) for intervals in panels.values())
    return svg_of(draw, 0.34 * tallest + 1.1, description)


def _most_bins(count: int) -> int:
    """Bins for so many values: few values show no shape in many bins."""
    return min(60, max(1, round(3.5 * math.sqrt(count))))


def _bins(values: NDArray[np.float64], count: int, *, whole: bool) -> NDArray[np.float64]:
    """Edges around ``values`` (n,) for a histogram of ``count`` of them; values that rounding parts are one value."""
    if whole:
        return _whole_bins(values)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    rounding = _ROUNDING * max(abs(low), abs(high))
    if high - low <= rounding:
        middle, half = low + (high - low) / 2, max(0.5, rounding)  # as NumPy does for equal values
        low, high = middle - half, middle + half
    return np.histogram_bin_edges(values, bins=_most_bins(count), range=(low, high))


def _whole_bins(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges between integers."""
    low, high = float(values.min()), float(values.max())
    width = max(1, int(np.ceil((high - low + 1) / _most_bins(len(values)))))
    return np.arange(low, high + 1 + width, width) - 0.5


def shown(text: str, longest: int = 40) -> str:
    """A name as a plot shows it: on one line, not too long."""
    line = re.sub(r"\s+", " ", printable(text))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def svg_of(draw: Callable[[Figure], None], height: float, description: str) -> str:
    """An ``<svg>`` element whose ids are its own, with ``description`` for those who can't see it."""
    buffer = io.StringIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's fonts draw the text
        mpl.rcdefaults()  # whatever the user's matplotlibrc says
        mpl.rcParams.update(_LOOK | {"svg.hashsalt": description})
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return _inline(buffer.getvalue(), description)


def _inline(document: str, description: str) -> str:
    """What of matplotlib's file belongs inside a page: no prologue, no xlink, no style of its own, ids made unique."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href=", "href=")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"[^a-z0-9]+", "-", description.lower()).strip("-")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names of groups: nothing refers to them
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    label = escape(printable(description))
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
