"""The README's chart of what each system finds: ``python -m benchmarks.quickstart_chart runs/quickstart``.

Means and their 95 % intervals over queries (1.96 standard errors), from the stored evaluation of a finished quickstart.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.chart import chart
from raytriever.reports.plots import BLUE, GREY, INK

MEASURE = "nDCG@10"
SYSTEMS = ("BM25", "base encoder", "trained on random batches", "trained encoder")


def draw(run: Path, target: Path) -> None:
    """Writes the chart of the quickstart in the folder ``run`` as SVG."""
    table = pq.read_table(run / "evaluation" / "per_query.parquet")
    values = [np.asarray(table[f"{system}/{MEASURE}"], dtype=np.float64) for system in SYSTEMS]
    means = [float(np.nanmean(each)) for each in values]
    errors = [1.96 * float(np.nanstd(each)) / len(each) ** 0.5 for each in values]
    with chart(target, 2.4, "quickstart") as axes:
        axes.barh(SYSTEMS, means, xerr=errors, color=[GREY, GREY, GREY, BLUE], ecolor=INK, height=0.62)
        for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
            axes.text(mean + error + 0.008, place, f"{mean:.4f}", va="center", color=INK)
        axes.set_xlim(0, max(means) * 1.18)
        axes.set_xlabel(f"{MEASURE} on {len(table):,} held-out questions about code")


def main() -> None:
    """Draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the output folder of a finished quickstart")
    parser.add_argument("--output", type=Path, default=Path("docs/quickstart.svg"))
    arguments = parser.parse_args()
    draw(arguments.run, arguments.output)


if __name__ == "__main__":
    main()
