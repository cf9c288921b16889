"""Charts of measured runs as SVG files for the documentation: one look, the same bytes for the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@contextmanager
def chart(target: Path, height: float, salt: str) -> Iterator[Axes]:
    """Axes to draw rows in, the first on top, which are then written to ``target``; ``salt`` makes ids its own."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 11}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(target, format="svg", metadata={"Date": None})
