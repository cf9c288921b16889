"""From embeddings to packed, masked batches through the jobs: time and memory against the number of pairs.

    python -m benchmarks.batch_construction --pairs 10000 100000 1000000

Makes JSON lines, and vectors of pairs that lie in topics, as an encoder would leave them, runs collect, pairs, cluster,
pack and filter on a local Ray, and prints for each size the seconds of every job, and the largest sums over all
processes of proportional set sizes and of private memory; then, fitted over the sizes, the power of N that a job's time
grows by. ``--json`` keeps the figures, and the processor seconds of every job's tasks by what they make, for
``benchmarks.scale_model``. Linux only.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.made_up_artifacts import collect_made_up, make_vectors, shard_rows
from benchmarks.process_memory import watched
from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import Artifact, ShardRecord
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Shard, Stage

_PAIRS_OF_A_TOPIC = 40


@dataclass(frozen=True)
class Figures:
    """Of one job: seconds by the clock; GiB of all processes at most, and those private; processor seconds of its tasks
    by their kind."""

    seconds: float
    gib: float
    private_gib: float
    tasks: dict[str, float]


_Figures = dict[str, Figures]  # by job


def main() -> None:
    """Measures every size, then fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--cluster-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--polish-sweeps", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the figures, which benchmarks.scale_model reads")
    arguments = parser.parse_args()
    measured: dict[int, _Figures] = {}
    for count in arguments.pairs:
        with tempfile.TemporaryDirectory() as temporary:
            measured[count] = _measure(Path(temporary), count, arguments)
        _print_figures(count, measured[count])
    if len(measured) > 1:
        _print_growth(measured)
    if arguments.json:
        runs = {count: {job: asdict(of_job) for job, of_job in jobs.items()} for count, jobs in measured.items()}
        settings = {name: getattr(arguments, name) for name in ("dimension", "cluster_size", "batch_size")}
        settings["cores"] = len(os.sched_getaffinity(0))
        arguments.json.write_text(json.dumps({**settings, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def _measure(folder: Path, count: int, arguments: argparse.Namespace) -> _Figures:
    with RaySession() as session:
        collect = collect_made_up(folder, documents=count, queries=count, judgments=count, split="train")
        figures = {collect.command: _run(collect, session, folder / "tasks" / collect.command)}
        collection = Artifact(collect.config.output)
        vectors = make_vectors(folder, collection, in_topics(count, arguments.dimension))
        stages = _stages(folder, collection.uri, vectors, arguments)
        return figures | {stage.command: _run(stage, session, folder / "tasks" / stage.command) for stage in stages}


def _stages(folder: Path, collection: str, vectors: str, arguments: argparse.Namespace) -> list[Stage[Any]]:
    pairs, clusters, packing = (str(folder / name) for name in ("pairs", "clusters", "packing"))
    settings = PackingSettings(batch_size=arguments.batch_size, polish_sweeps=arguments.polish_sweeps)
    polish: dict[str, Any] = {"pairs": pairs, "vectors": vectors} if arguments.polish_sweeps else {}
    return [
        Pairs(PairsConfig(collection=collection, output=pairs)),
        Cluster(ClusterConfig(pairs=pairs, vectors=vectors, cluster_size=arguments.cluster_size, output=clusters)),
        Pack(PackConfig(clusters=clusters, packing=settings, output=packing, **polish)),
        Filter(
            FilterConfig(
                packing=packing, pairs=pairs, collection=collection, vectors=vectors, output=str(folder / "batches")
            )
        ),
    ]


def _run(stage: Stage[Any], session: RaySession, times: Path) -> Figures:
    """``times``: a new folder, for what the tasks took."""
    times.mkdir(parents=True)
    started = time.monotonic()
    with watched() as peak:
        run_stage(_timed(stage, times), session)
    seconds = time.monotonic() - started
    tasks: defaultdict[str, float] = defaultdict(float)
    for path in times.iterdir():
        tasks[_kind(path.name)] += float(path.read_text(encoding="utf-8"))
    return Figures(seconds, peak["Pss"] / 2**20, peak["Pss_Anon"] / 2**20, dict(tasks))


def _timed(stage: Stage[Any], times: Path) -> Stage[Any]:
    """The stage, each of whose tasks leaves its processor seconds in a file that is named as its shard."""

    class Timed(type(stage)):
        def make_shard(self, shard: Shard) -> ShardRecord:
            started = time.process_time()
            record = super().make_shard(shard)
            (times / shard.name).write_text(str(time.process_time() - started), encoding="utf-8")
            return record

    return Timed(stage.config)


def _kind(shard: str) -> str:
    """A shard's name without its number: ``keys-documents``; that of a domain is a number alone."""
    return re.sub(r"[-=]?\d.*", "", shard) or "domain"


def in_topics(count: int, dimension: int) -> dict[str, Iterator[NDArray[np.float32]]]:
    """Vectors in topics, topics in fields; the two sides a constant apart, as encoders leave them."""
    generator = np.random.default_rng(0)
    topics = generator.standard_normal((max(1, count // _PAIRS_OF_A_TOPIC), dimension), dtype=np.float32)
    topics += (
        1.5 * generator.standard_normal((64, dimension), dtype=np.float32)[generator.integers(64, size=len(topics))]
    )
    topic_of = generator.integers(len(topics), size=count)
    offset = 0.5 * generator.standard_normal(dimension, dtype=np.float32)

    def blocks(seed: int, shift: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        for number, rows in enumerate(shard_rows(count)):
            own = np.random.default_rng([seed, number])
            values = topics[topic_of[rows]] + own.standard_normal((rows.stop - rows.start, dimension), dtype=np.float32)
            yield values + shift

    return {"documents": blocks(1, -offset), "queries": blocks(2, offset)}


def _print_figures(count: int, figures: _Figures) -> None:
    told = [f"{job} {of.seconds:.0f} s ({of.gib:.2f} GiB, {of.private_gib:.2f} private)" for job, of in figures.items()]
    total = sum(of_job.seconds for of_job in figures.values())
    print(f"{count:,} pairs: {', '.join(told)}; in all {total:.0f} s", flush=True)


def _print_growth(measured: dict[int, _Figures]) -> None:
    sizes = np.log(list(measured))
    for job in next(iter(measured.values())):
        seconds = np.log([figures[job].seconds for figures in measured.values()])
        power = np.diff(seconds) / np.diff(sizes)
        print(f"{job}: time grows as N^{', N^'.join(f'{value:.2f}' for value in power)} from size to size")


if __name__ == "__main__":
    main()
