"""Hours of a whole run over the pairs of many domains on 1, 8 and 64 nodes: modelled, not measured.

    python -m benchmarks.scale_model --nodes 1 8 64

From collecting to evaluation, stage by stage: what jobs say of their own cost, against cores, GPUs, the driver, and the
bandwidth of a node and of the store; training by its number of weights. Computing and moving bytes follow one another,
as where files are copied before they are mapped, once on each node for all stages. A stage takes as many of the nodes
as make it fastest.
Prints for each number of nodes the hours, what bounds each stage, the bottleneck, and the efficiency against one node.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.clustering.kmeans import KMeansSettings, number_of_clusters
from pipelines.jobs.cluster import LARGE_DOMAIN
from raytriever.errors import UserError
from raytriever.jobs import stage_class
from raytriever.prefetching import TOKENIZING_THREADS
from raytriever.reports.table import counted
from raytriever.stages.cost import STORED, Cost, Size
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.estimate.machines import GPUS, Machines, seconds_by_cause
from trainers.estimate.recipe import TOKENIZE, EncoderCost, embedding_causes
from trainers.rehearsal.models import published

DOMAINS = tuple[int, ...](published()["collections"]["data/nomic_unsupervised"]["domains"])
NODE = Machines("a100", 8, *GPUS["a100"], cores=96)
_FORWARD, _BACKWARD = 2, 4  # operations of a weight and a token


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
        return self.pairs * (self.document_bytes + self.query_bytes)

    @property
    def vector_bytes(self) -> float:
        """Of both vectors of all pairs."""
        return 2 * 2 * self.pairs * self.dimension


Causes = Mapping[str, float]


@dataclass(frozen=True)
class Modelled:
    """A stage: its seconds by cause on some machines, of which each node copies so many bytes; ``copied``: which."""

    name: str
    causes: Callable[[Machines, float], Causes]
    copied: Mapping[str, float] = field(default_factory=dict)


def costs(workload: Workload) -> dict[str, Cost]:
    """What the jobs without a GPU say of their own cost, those of batches and those that search the corpus."""
    packing = {"batch_size": workload.batch_size}
    of_pairs: dict[str, dict[str, Any]] = {
        "collect": {"source": {"kind": "beir", "path": "source"}},
        "pairs": {"collection": "texts"},
        "cluster": {"pairs": "pairs", "vectors": "vectors", "cluster_size": workload.cluster_size},
        "pack": {"clusters": "clusters", "packing": packing, "epochs": workload.epochs},
        "filter": {"packing": "packing", "pairs": "pairs", "collection": "texts", "vectors": "vectors"},
    }
    of_corpus: dict[str, dict[str, Any]] = {
        "chunk": {"collection": "corpus"},
        "index": {"index": {"kind": "vectors", "vectors": "passages"}},
        "search": {"index": "index", "collection": "corpus", "vectors": "passages"},
        "evaluate": {"collection": "corpus", "runs": {"one": "run", "another": "run"}},
    }
    counts, judged = (workload.pairs, workload.document_bytes, workload.query_bytes), (workload.pairs, workload.pairs)
    size = Size(*counts, {"train": judged}, domains=workload.domains, dimension=workload.dimension)
    asked = {"test": (workload.queries, workload.queries)}
    corpus = Size(workload.passages, workload.passage_bytes, splits=asked, dimension=workload.trained_dimension)
    found = {}
    for jobs, read in ((of_pairs, size), (of_corpus, corpus)):
        for job, settings in jobs.items():
            stage = stage_class(job, job)
            found[job] = stage(stage.config_class.model_validate(settings | {"output": job})).cost(read)
            read = found[job].made if job != "chunk" else read  # passages are as many as they are
    return found


def stages(workload: Workload, factors: Mapping[str, float]) -> list[Modelled]:
    """Those of a run in order. ``factors``: how many times as long jobs take here as by the measured constants."""
    texts, vectors = {"texts": STORED * workload.text_bytes}, {"vectors": workload.vector_bytes}
    passages = {"passages": 2 * workload.passages * workload.trained_dimension}
    corpus = {"corpus": workload.passages * workload.passage_bytes}
    copied: dict[str, Mapping[str, float]] = {
        "collect": {"source": workload.text_bytes},
        "pairs": texts,
        "cluster": vectors,
        "pack": vectors,
        "filter": vectors | texts,
        "chunk": corpus,
        "index": passages,
        "search": {"index": 4 * workload.passages * workload.trained_dimension},
        "evaluate": {},
    }
    found = {}
    for job, cost in costs(workload).items():
        times = factors.get(job, 1)
        scaled = replace(cost, work=times * cost.work, alone=times * cost.alone)
        found[job] = Modelled(job, partial(_on_cores, scaled), copied[job])
    sides = [(workload.pairs, workload.document_bytes), (workload.pairs, workload.query_bytes)]
    read = [(workload.passages, workload.passage_bytes)]
    small, trained = (
        (workload.embedding_weights, workload.dimension),
        (workload.trained_weights, workload.trained_dimension),
    )
    found["embed pairs"] = Modelled("embed pairs", partial(_embed, sides, *small, workload.embedders_per_gpu))
    found["train"] = Modelled("train", partial(_train, workload))
    found["embed corpus"] = Modelled("embed corpus", partial(_embed, read, *trained, workload.embedders_per_gpu))
    before = ("collect", "chunk", "embed pairs", "pairs", "cluster", "pack", "filter", "train", "embed corpus")
    return [found[name] for name in (*before, "index", "search", "evaluate")]


def _on_cores(cost: Cost, machines: Machines, copied: float) -> Causes:
    return seconds_by_cause(cost, copied, machines)


def _embed(
    texts: Sequence[tuple[int, float]], weights: float, dimension: int, per_gpu: int, machines: Machines, _: float
) -> Causes:
    encoder = EncoderCost(_FORWARD * weights / machines.operations(), dimension)
    return embedding_causes(texts, encoder, machines, per_gpu)


def _train(workload: Workload, machines: Machines, _: float) -> Causes:
    """By the number of weights; a power of two of nodes takes part.

    More than a chunk is encoded twice, for the gradient cache. Gradients of layers are exchanged behind the last
    backward pass, of a chunk of documents; those of words are complete at its end.
    """
    nodes = 2 ** (machines.nodes.bit_length() - 1)
    gpus = nodes * machines.per_node
    steps = workload.epochs * workload.pairs / workload.pairs_per_step
    tokens = workload.epochs * workload.text_bytes / BYTES_OF_A_TOKEN / (steps * gpus)
    of_documents = workload.document_bytes / (workload.query_bytes + workload.document_bytes)
    operations = _FORWARD * (2 if tokens > CHUNK_TOKENS_ON_GPU else 1) + _BACKWARD
    computing = tokens * operations * workload.trained_weights / machines.operations()
    tokenizing = tokens * TOKENIZE / TOKENIZING_THREADS
    of_weight = 2 * workload.exchange_bytes / machines.network / 1e9 if nodes > 1 else 0.0
    slowest = max(computing, tokenizing)
    last = min(of_documents, CHUNK_TOKENS_ON_GPU / tokens) * _BACKWARD / operations * slowest
    exchange = max(0.0, of_weight * workload.trained_weights - last) + of_weight * workload.word_weights
    working = {"GPUs" if computing >= tokenizing else "tokenizing": steps * slowest}
    return working | {"exchange of gradients": steps * exchange}


def calibrated(figures: Mapping[str, Any]) -> dict[str, float]:
    """How many times as long jobs took as they say, in the largest run of ``benchmarks.batch_construction --json``.

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
    run, free = figures["runs"][str(size)], replace(NODE, cores=cores, node_bandwidth=1e9, store_bandwidth=1e9)
    measured = {name: figures[name] for name in ("batch_size", "cluster_size", "dimension")}
    said = costs(Workload(domains=(size,), epochs=1, **measured))
    modelled = {job: sum(_on_cores(said[job], free, 0).values()) for job in ("pairs", "cluster", "pack", "filter")}
    return {job: run[job]["seconds"] / seconds for job, seconds in modelled.items()}


@dataclass(frozen=True)
class Forecast:
    """Of a stage: the nodes that it takes, the bytes that each copies, by name, and its seconds by cause."""

    name: str
    nodes: int
    copied: Mapping[str, float]
    causes: Causes

    @property
    def seconds(self) -> float:
        """Of all causes."""
        return sum(self.causes.values())

    @property
    def bound(self) -> str:
        """The cause of the most seconds."""
        return max(self.causes, key=lambda cause: self.causes[cause])


def forecasts(workload: Workload, machines: Machines, factors: Mapping[str, float]) -> list[Forecast]:
    """Of every stage, on as many of the nodes as make it fastest, the fewest of equals."""
    found, held = list[Forecast](), dict[str, int]()
    for stage in stages(workload, factors):
        tried = []
        for nodes in range(1, machines.nodes + 1):
            copied = {name: size for name, size in stage.copied.items() if held.get(name, 0) < nodes}
            some = replace(machines, count=nodes * machines.per_node)
            tried.append(Forecast(stage.name, nodes, copied, stage.causes(some, sum(copied.values()))))
        best = min(tried, key=lambda forecast: forecast.seconds)
        held |= {name: max(best.nodes, held.get(name, 0)) for name in best.copied}
        found.append(best)
    return found


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
        lines.append(f"| {forecast.name} | {hours} | {forecast.nodes} | {bound} |")
    slowest = max(found, key=lambda forecast: forecast.seconds)
    gain = hours_of_one / total
    copied = sum(size for forecast in found for size in forecast.copied.values())
    return "\n".join(
        [
            *lines,
            f"| all | {total:.1f} | | |",
            "",
            f"Bottleneck: {slowest.name}, {slowest.seconds / 36 / total:.0f} % of the hours, by {slowest.bound}."
            f" {gain:.1f} times as fast as one node: efficiency {gain / machines.nodes:.0%}."
            f" A node copies at most {copied / 1e9:,.0f} GB.",
        ]
    )


def main() -> None:
    """Prints a table for each number of nodes."""
    workload = Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--pairs", type=int, default=workload.pairs, help="of all domains, in the paper's proportions")
    parser.add_argument("--embedders-per-gpu", type=int, default=workload.embedders_per_gpu, help="workers of embed")
    parser.add_argument("--epochs", type=int, default=workload.epochs)
    parser.add_argument("--exchange-bf16", action="store_true", help="training.exchange_bf16")
    parser.add_argument("--cores", type=int, default=NODE.cores, help="of a node")
    parser.add_argument("--gpus", type=int, default=NODE.per_node, help="of a node")
    parser.add_argument("--peak", type=float, default=NODE.peak, help="TFLOP/s of a GPU")
    parser.add_argument("--share", type=float, default=NODE.share, help="of the peak: an assumption")
    parser.add_argument("--node-bandwidth", type=float, default=NODE.node_bandwidth, help="GB/s to the store")
    parser.add_argument("--store-bandwidth", type=float, default=NODE.store_bandwidth, help="GB/s, all nodes")
    parser.add_argument("--calibration", type=Path, help="what benchmarks.batch_construction --json wrote")
    given = parser.parse_args()
    if min(*given.nodes, given.embedders_per_gpu, given.epochs, given.cores, given.gpus) < 1:
        parser.error("nodes, embedders, epochs, cores and GPUs are at least 1 each")
    factors: Mapping[str, float] = {}
    if given.calibration:
        figures = json.loads(given.calibration.read_text(encoding="utf-8"))
        workload = replace(workload, **{name: figures[name] for name in ("dimension", "cluster_size", "batch_size")})
        try:
            factors = calibrated(figures)
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
    node = replace(
        NODE,
        count=given.gpus,
        per_node=given.gpus,
        cores=given.cores,
        peak=given.peak,
        share=given.share,
        node_bandwidth=given.node_bandwidth,
        store_bandwidth=given.store_bandwidth,
    )
    hours_of_one = total_hours(forecasts(workload, node, factors))
    for nodes in given.nodes:
        machines = replace(node, count=nodes * given.gpus)
        found = forecasts(workload, machines, factors)
        of_node = f"{node.cores} cores and {node.per_node} GPUs"
        print(f"{workload.pairs:,} pairs, {counted(nodes, 'node')} of {of_node}\n")
        print(table(found, machines, hours_of_one) + "\n")


if __name__ == "__main__":
    main()
