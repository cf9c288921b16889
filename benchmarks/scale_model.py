"""Hours of a whole run over the pairs of many domains on 1, 8 and 64 nodes: modelled, not measured.

    python -m benchmarks.scale_model --nodes 1 8 64

From collecting to evaluation, stage by stage: tasks as ``trainers.estimate.costs`` has them, each begun on the first
core or GPU that is free; bytes against the bandwidth of a node and of the store; start-up. Computing and moving bytes
follow one another, as where files are copied before they are mapped, once on each node for all stages. A stage takes as
many of the nodes as make it fastest.
Prints for each number of nodes the hours, what bounds each stage, the bottleneck, and the efficiency against one node.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.clustering.kmeans import KMeansSettings, number_of_clusters
from pipelines.jobs.cluster import LARGE_DOMAIN
from raytriever.errors import UserError
from raytriever.prefetching import TOKENIZING_THREADS
from raytriever.reports.table import counted
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.estimate.costs import (
    LAWS,
    Calibration,
    Embedding,
    Size,
    Stage,
    embedding_stage,
    makespan,
    seconds_by_cause,
    training_stage,
)
from trainers.estimate.machines import Machines
from trainers.estimate.outlines import published

DOMAINS = tuple[int, ...](published()["domains"])
_FORWARD, _BACKWARD = 2, 4  # operations of a weight and a token
_OF_PAIRS = ("collect", "pairs", "cluster", "pack", "filter")
_OF_CORPUS = ("chunk", "index", "search", "evaluate")


@dataclass(frozen=True)
class Workload:
    """What is run; all but the domains is an assumption. Batches and clusters are of 64, as they were measured."""

    domains: tuple[int, ...] = DOMAINS
    epochs: int = 3
    document_bytes: float = 600
    query_bytes: float = 100
    cluster_size: int = 64
    batch_size: int = 64
    dimension: int = 384
    embedding_weights: float = 10.6e6  # of the layers of all-MiniLM-L6-v2
    embedders_per_gpu: int = 1  # workers of embed that share one, each with a core
    trained_dimension: int = 768
    trained_weights: float = 113e6  # of the layers of a BERT of 137 million weights
    word_weights: float = 24e6  # of its vectors of words
    exchange_bytes: float = 4  # a gradient as it is sent
    pairs_per_step: int = 4_096
    passages: int = 21_000_000  # of the corpus that is searched
    passage_bytes: float = 620
    queries: int = 10_000

    @property
    def pairs(self) -> int:
        """Of all domains."""
        return sum(self.domains)

    @property
    def text_bytes(self) -> float:
        """Of all pairs."""
        return self.of_pairs(*self.domains).text_bytes

    def of_pairs(self, *domains: int) -> Size:
        """What stages process that make batches of these domains."""
        return Size(
            document_bytes=self.document_bytes,
            query_bytes=self.query_bytes,
            pairs=sum(domains),
            domains=domains,
            rows=self.batch_size,
            epochs=self.epochs,
            cluster_size=self.cluster_size,
            dimension=self.dimension,
        )

    def of_corpus(self) -> Size:
        """What stages process that search the corpus by the trained encoder."""
        return Size(
            documents=self.passages,
            document_bytes=self.passage_bytes,
            splits={"test": [self.queries]},
            dimension=self.trained_dimension,
        )


def calibrated(figures: Mapping[str, Any]) -> Calibration:
    """With the largest run of what ``benchmarks.batch_construction --json`` wrote.

    Raises ``UserError`` where that is of too few pairs for their k-means to run on all cores.
    """
    cores, size = int(figures["cores"]), max(map(int, figures["runs"]))
    clusters, levels = number_of_clusters(size, figures["cluster_size"]), KMeansSettings().two_level_above
    if size <= LARGE_DOMAIN or clusters <= levels:
        raise UserError(
            f"The largest run has {size:,} pairs in {clusters:,} clusters. Up to {LARGE_DOMAIN:,} are clustered in one"
            f" task, up to {levels:,} clusters in one level, which says little about more: measure with"
            " benchmarks.batch_construction --pairs 1000000, or more where --cluster-size is above 200."
        )
    run = figures["runs"][str(size)]
    pairs = Size(pairs=size, domains=(size,), rows=figures["batch_size"], cluster_size=figures["cluster_size"])
    alike = Calibration(cluster_rows=run["cluster"]["tasks"]["by_domain"] / size)
    of_pair = {}
    for job in ("pairs", "cluster", "pack", "filter"):
        a_second_each = replace(alike, **{job: 1.0}, cluster_rows=0.0, open_vectors=0.0)
        phases = LAWS[job](pairs, a_second_each, Machines(cores=cores)).phases
        of_pair[job] = run[job]["seconds"] / sum(makespan(phase.tasks, cores) for phase in phases)
    return replace(alike, **of_pair)


def stages(workload: Workload, calibration: Calibration, machines: Machines) -> list[Stage]:
    """Those of a run in order, on all of these nodes."""
    pairs, per_gpu = workload.pairs, workload.embedders_per_gpu
    sides = ((pairs, workload.document_bytes), (pairs, workload.query_bytes))
    corpus = ((workload.passages, workload.passage_bytes),)
    found = {name: LAWS[name](workload.of_pairs(*workload.domains), calibration, machines) for name in _OF_PAIRS}
    found |= {name: LAWS[name](workload.of_corpus(), calibration, machines) for name in _OF_CORPUS}
    embedding, trained = (
        Embedding(_FORWARD * weights / machines.operations, dimension, per_gpu)
        for weights, dimension in (
            (workload.embedding_weights, workload.dimension),
            (workload.trained_weights, workload.trained_dimension),
        )
    )
    found["embed pairs"] = embedding_stage("embed pairs", sides, embedding, calibration, machines)
    found["train"] = _train(workload, calibration, machines)
    found["embed corpus"] = embedding_stage("embed corpus", corpus, trained, calibration, machines)
    before = ("collect", "chunk", "embed pairs", "pairs", "cluster", "pack", "filter", "train", "embed corpus")
    return [found[name] for name in (*before, "index", "search", "evaluate")]


def _train(workload: Workload, calibration: Calibration, machines: Machines) -> Stage:
    """By the number of weights; a power of two of nodes takes part.

    More than a chunk is encoded twice, for the gradient cache. Gradients of layers are exchanged behind the last
    backward pass, of a chunk of documents; those of words are complete at its end.
    """
    nodes = 2 ** (machines.nodes.bit_length() - 1)
    gpus = nodes * machines.gpus
    steps = workload.epochs * workload.pairs / workload.pairs_per_step
    tokens = workload.epochs * workload.text_bytes / calibration.bytes_per_token / (steps * gpus)
    of_documents = workload.document_bytes / (workload.query_bytes + workload.document_bytes)
    operations = _FORWARD * (2 if tokens > CHUNK_TOKENS_ON_GPU else 1) + _BACKWARD
    seconds = {
        "GPUs": tokens * operations * workload.trained_weights / machines.operations,
        "tokenizing": tokens * calibration.tokenize / TOKENIZING_THREADS,
    }
    of_weight = 2 * workload.exchange_bytes / machines.network if nodes > 1 else 0.0
    last = min(of_documents, CHUNK_TOKENS_ON_GPU / tokens) * _BACKWARD / operations * max(seconds.values())
    exchange = max(0.0, of_weight * workload.trained_weights - last) + of_weight * workload.word_weights
    stored = workload.text_bytes * calibration.stored
    return training_stage(gpus, steps, seconds, exchange, workload.epochs * stored)


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


def forecasts(workload: Workload, calibration: Calibration, machines: Machines) -> list[Forecast]:
    """Of every stage, on as many of the nodes as make it fastest, the fewest of equals."""
    some = [replace(machines, nodes=nodes) for nodes in range(1, machines.nodes + 1)]
    found, held = list[Forecast](), dict[str, int]()
    for of_nodes in zip(*(stages(workload, calibration, each) for each in some), strict=True):
        tried = []
        for stage, each in zip(of_nodes, some, strict=True):
            reading = where_held(stage, each.nodes, held)
            tried.append(Forecast(reading, each.nodes, seconds_by_cause(reading, calibration, each)))
        best = min(tried, key=lambda forecast: forecast.seconds)
        held |= {name: max(best.nodes, held.get(name, 0)) for name in best.stage.copied}
        found.append(best)
    return found


def where_held(stage: Stage, nodes: int, held: Mapping[str, int]) -> Stage:
    """The same on so many nodes, of which as many as ``held`` says have copies of earlier stages' reading."""
    return replace(stage, copied={name: size for name, size in stage.copied.items() if held.get(name, 0) < nodes})


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
    copied = sum(size for forecast in found for size in forecast.stage.copied.values())
    return "\n".join(
        [
            *lines,
            f"| all | {total:.1f} | | |",
            "",
            f"Bottleneck: {slowest.stage.name}, {slowest.seconds / 36 / total:.0f} % of the hours, by {slowest.bound}."
            f" {gain:.1f} times as fast as one node: efficiency {gain / machines.nodes:.0%}."
            f" A node copies at most {copied / 1e9:,.0f} GB.",
        ]
    )


def main() -> None:
    """Prints a table for each number of nodes."""
    machines, workload = Machines(), Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--pairs", type=int, default=workload.pairs, help="of all domains, in the paper's proportions")
    parser.add_argument("--embedders-per-gpu", type=int, default=workload.embedders_per_gpu, help="workers of embed")
    parser.add_argument("--epochs", type=int, default=workload.epochs)
    parser.add_argument("--exchange-bf16", action="store_true", help="training.exchange_bf16")
    parser.add_argument("--cores", type=int, default=machines.cores, help="of a node")
    parser.add_argument("--gpus", type=int, default=machines.gpus, help="of a node")
    parser.add_argument("--peak", type=float, default=machines.peak / 1e12, help="TFLOP/s of a GPU")
    parser.add_argument("--share", type=float, default=machines.share, help="of the peak: an assumption")
    parser.add_argument("--node-bandwidth", type=float, default=machines.node_bandwidth / 1e9, help="GB/s to the store")
    parser.add_argument("--store-bandwidth", type=float, default=machines.store_bandwidth / 1e9, help="GB/s, all nodes")
    parser.add_argument("--calibration", type=Path, help="what benchmarks.batch_construction --json wrote")
    given = parser.parse_args()
    if min(*given.nodes, given.embedders_per_gpu, given.epochs, given.cores, given.gpus) < 1:
        parser.error("nodes, embedders, epochs, cores and GPUs are at least 1 each")
    calibration = Calibration()
    if given.calibration:
        figures = json.loads(given.calibration.read_text(encoding="utf-8"))
        workload = replace(workload, **{name: figures[name] for name in ("dimension", "cluster_size", "batch_size")})
        try:
            calibration = calibrated(figures)
        except UserError as error:
            parser.error(str(error))
    domains = tuple(max(1, round(size * given.pairs / workload.pairs)) for size in workload.domains)
    workload = replace(
        workload,
        domains=domains,
        embedders_per_gpu=given.embedders_per_gpu,
        epochs=given.epochs,
        exchange_bytes=2 if given.exchange_bf16 else workload.exchange_bytes,
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
