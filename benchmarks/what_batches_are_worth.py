"""The chart of what batches are worth: ``python -m benchmarks.what_batches_are_worth runs/probe/probe``.

From a finished probe: how much each way's encoders gain over those of the first one, every seed a dot, beside twice the
seeds' pooled standard deviation: what lies within it may be chance.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chart import chart
from raytriever.reports.plots import BLUE, GREY, INK


def draw(ways: Mapping[str, Any], measure: str, target: Path) -> None:
    """Writes the chart as SVG. ``ways``: as a probe's ``trials.json`` has them."""
    trained = {name: way for name, way in ways.items() if "deviation" in way}
    first = next(iter(trained.values()))["mean"]
    spread = 2 * float(np.sqrt(np.mean([way["deviation"] ** 2 for way in trained.values()])))
    with chart(target, 0.4 + 0.3 * len(trained), "batches") as axes:
        axes.axvspan(-spread, spread, color=GREY, alpha=0.35, lw=0)
        for place, way in enumerate(trained.values()):
            gains = [value - first for value in way["of_seeds"]]
            axes.plot(gains, [place] * len(gains), "o", color=BLUE, ms=4, alpha=0.6)
            axes.plot(way["mean"] - first, place, "|", color=INK, ms=14, mew=2)
            beside = axes.get_yaxis_transform()
            axes.text(1.01, place, f"{way['mean']:.4f}", va="center", color=INK, transform=beside)
        axes.set_yticks(range(len(trained)), list(trained))
        axes.set_xlabel(f"gain in {measure} over '{next(iter(trained))}'; grey: ±2 SD over seeds")


def main() -> None:
    """Draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("probe", type=Path, help="the folder of a finished probe")
    parser.add_argument("--output", type=Path, default=Path("docs/reports/batches.svg"))
    arguments = parser.parse_args()
    metrics = json.loads((arguments.probe / "metrics.json").read_text())
    measure = next(iter(next(iter(metrics["means"].values()))))
    draw(json.loads((arguments.probe / "trials.json").read_text())["ways"], measure, arguments.output)


if __name__ == "__main__":
    main()
