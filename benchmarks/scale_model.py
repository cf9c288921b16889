"""Hours of a whole run over the pairs of many domains on 1, 8 and 64 nodes: modelled, not measured.

    python -m benchmarks.scale_model --nodes 1 8 64

From collecting to evaluation, stage by stage: tasks as ``benchmarks.stage_costs`` has them, each begun on the first
core or GPU that is free; bytes against the bandwidth of a node and of the store; start-up. Computing and moving bytes
follow one another, as where files are copied before they are mapped. A stage takes as many of the nodes as make it
fastest.
Prints for each number of nodes the hours, what bounds each stage, the bottleneck, and the efficiency against one node.
"""

import argparse
import heapq
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scale_calibration import Calibration
from benchmarks.stage_costs import Machines, Stage, Workload, stages
from raytriever.errors import UserError
from raytriever.reports.table import counted


@dataclass(frozen=True)
class Forecast:
    """Of a stage: the nodes that it takes, and its seconds by cause."""

    stage: Stage
    nodes: int
    causes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of all causes."""
        return sum(self.causes.values())

    @property
    def bound(self) -> str:
        """The cause of the most seconds."""
        return max(self.causes, key=lambda cause: self.causes[cause])


def makespan(tasks: Sequence[float], slots: int) -> float:
    """When the last task ends, each begun in this order on the first slot that is free."""
    if len(tasks) <= slots:
        return max(tasks)
    free = [0.0] * slots
    for seconds in tasks:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def seconds_by_cause(stage: Stage, calibration: Calibration, machines: Machines) -> dict[str, float]:
    """The stage's seconds on all of these nodes, by what they are spent on or waited for."""
    found = defaultdict(float, stage.alone)
    for phase in stage.phases:
        slots = machines.nodes * (machines.gpus * phase.workers_per_gpu or machines.cores)
        working, handing_out = makespan(phase.tasks, slots), calibration.task * len(phase.tasks)
        waited_for = phase.largest if max(phase.tasks) * slots > sum(phase.tasks) else phase.slots
        found["the driver" if handing_out > working else waited_for] += max(working, handing_out)
        if phase.starts:
            found["start-up"] += calibration.start_up
    busy = min(machines.nodes, max(len(phase.tasks) for phase in stage.phases))  # nodes with a task
    of_node = (stage.copied + stage.shared / busy) / machines.node_bandwidth
    of_store = (stage.copied * busy + stage.shared) / machines.store_bandwidth
    found["the store" if of_store > of_node else "a node's reading"] += max(of_node, of_store)
    return found


def forecasts(workload: Workload, calibration: Calibration, machines: Machines) -> list[Forecast]:
    """Of every stage, on as many of the nodes as make it fastest, the fewest of equals."""
    best: list[Forecast] = []
    for nodes in range(1, machines.nodes + 1):
        some = replace(machines, nodes=nodes)
        found = [
            Forecast(stage, nodes, seconds_by_cause(stage, calibration, some))
            for stage in stages(workload, calibration, some)
        ]
        pairs = zip(best or found, found, strict=True)
        best = [min(before, now, key=lambda forecast: forecast.seconds) for before, now in pairs]
    return best


def total_hours(found: Sequence[Forecast]) -> float:
    """The stages one after another."""
    return sum(forecast.seconds for forecast in found) / 3600


def table(found: Sequence[Forecast], machines: Machines, hours_of_one: float) -> str:
    """A Markdown table of the stages, and lines about the whole."""
    total = total_hours(found)
    lines = ["| stage | hours | nodes | most of it |", "|---|---|---|---|"]
    for forecast in found:
        share = forecast.causes[forecast.bound] / forecast.seconds
        hours, bound = f"{forecast.seconds / 3600:.2f}", f"{forecast.bound} ({share:.0%})"
        lines.append(f"| {forecast.stage.name} | {hours} | {forecast.nodes} | {bound} |")
    slowest = max(found, key=lambda forecast: forecast.seconds)
    gain = hours_of_one / total
    copied = max(forecast.stage.copied for forecast in found)
    return "\n".join(
        [
            *lines,
            f"| all | {total:.1f} | | |",
            "",
            f"Bottleneck: {slowest.stage.name}, {slowest.seconds / 36 / total:.0f} % of the hours, by {slowest.bound}."
            f" {gain:.1f} times as fast as one node: efficiency {gain / machines.nodes:.0%}."
            f" A node copies at most {copied / 1e9:,.0f} GB for a stage.",
        ]
    )


def main() -> None:
    """Prints a table for each number of nodes."""
    machines, workload = Machines(), Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--pairs", type=int, default=workload.pairs, help="of all domains, in the paper's proportions")
    parser.add_argument("--parts", type=int, default=workload.parts, help="runs side by side, up to their batches")
    parser.add_argument("--embedders-per-gpu", type=int, default=workload.embedders_per_gpu, help="workers of embed")
    parser.add_argument("--epochs", type=int, default=workload.epochs)
    parser.add_argument("--cores", type=int, default=machines.cores, help="of a node")
    parser.add_argument("--gpus", type=int, default=machines.gpus, help="of a node")
    parser.add_argument("--peak", type=float, default=machines.peak / 1e12, help="TFLOP/s of a GPU")
    parser.add_argument("--share", type=float, default=machines.share, help="of the peak: an assumption")
    parser.add_argument("--node-bandwidth", type=float, default=machines.node_bandwidth / 1e9, help="GB/s to the store")
    parser.add_argument("--store-bandwidth", type=float, default=machines.store_bandwidth / 1e9, help="GB/s, all nodes")
    parser.add_argument("--calibration", type=Path, help="what benchmarks.batch_construction --json wrote")
    given = parser.parse_args()
    if min(*given.nodes, given.parts, given.embedders_per_gpu, given.epochs, given.cores, given.gpus) < 1:
        parser.error("nodes, parts, embedders, epochs, cores and GPUs are at least 1 each")
    calibration = Calibration()
    if given.calibration:
        figures = json.loads(given.calibration.read_text(encoding="utf-8"))
        workload = replace(workload, **{name: figures[name] for name in ("dimension", "cluster_size", "batch_size")})
        try:
            calibration = calibration.with_runs(figures)
        except UserError as error:
            parser.error(str(error))
    domains = tuple(max(1, round(size * given.pairs / workload.pairs)) for size in workload.domains)
    workload = replace(
        workload,
        domains=domains,
        parts=given.parts,
        embedders_per_gpu=given.embedders_per_gpu,
        epochs=given.epochs,
    )
    machines = replace(
        machines,
        cores=given.cores,
        gpus=given.gpus,
        peak=given.peak * 1e12,
        share=given.share,
        node_bandwidth=given.node_bandwidth * 1e9,
        store_bandwidth=given.store_bandwidth * 1e9,
    )
    hours_of_one = total_hours(forecasts(workload, calibration, machines))
    for nodes in given.nodes:
        of_nodes = replace(machines, nodes=nodes)
        found = forecasts(workload, calibration, of_nodes)
        of_node = f"{machines.cores} cores and {machines.gpus} GPUs"
        print(f"{workload.pairs:,} pairs, {counted(nodes, 'node')} of {of_node}\n")
        print(table(found, of_nodes, hours_of_one) + "\n")


if __name__ == "__main__":
    main()
