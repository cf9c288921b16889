"""What stages cost, tasks in seconds and bytes: of a recipe, or of the run that ``benchmarks.scale_model`` has.

Work follows the laws of the algorithms in the number of pairs; tasks are cut as the jobs cut them. Constants of the
laws are measured (``trainers.estimate.calibration``); what is run, and on what, is given (``Workload``, ``Machines``).
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, isqrt, log2, sqrt
from statistics import NormalDist

from pipelines.clustering.kmeans import NEAR_CELLS, REFINEMENTS, KMeansSettings, cell_sample, number_of_clusters
from pipelines.clustering.points import PART_POINTS
from pipelines.jobs.chunk import ChunkConfig
from pipelines.jobs.cluster import LARGE_DOMAIN
from pipelines.jobs.collect import CollectConfig
from pipelines.jobs.filter import FilterConfig
from pipelines.jobs.pack import PART_PAIRS
from pipelines.jobs.pairs import PairsConfig
from pipelines.packing.neighbours import EXACT_UP_TO
from retrieval.jobs.embed import ON_GPU
from retrieval.jobs.index import VectorIndexSettings
from retrieval.jobs.search import SearchConfig
from trainers.estimate.calibration import Calibration

# pairs of each domain: Contextual Document Embeddings (Morris & Rush 2024, arXiv 2410.02525), Table 5
DOMAINS = (
    64_978_944, 52_953_088, 38_682_624, 35_438_592, 9_912_320, 7_585_792, 7_503_872, 6_389_760, 6_078_464, 1_245_184,
    835_584, 409_600, 344_064, 344_064, 278_528, 262_144, 212_992, 196_608, 163_840, 131_072, 98_304, 98_304, 81_920,
    81_920, 65_536, 65_536, 65_536, 32_768, 16_384,
)  # fmt: skip
# the jobs' defaults
TEXTS_PER_VECTOR_FILE = ON_GPU["texts_per_shard"]
_HASHED_TEXTS: int = PairsConfig.model_fields["texts_per_shard"].default
_ROWS_PER_FILE: int = CollectConfig.model_fields["rows_per_file"].default
_BATCHES_PER_SHARD: int = FilterConfig.model_fields["batches_per_shard"].default
_QUERIES_PER_SHARD: int = SearchConfig.model_fields["queries_per_shard"].default
_CHUNKED_BYTES: float = 1e6 * ChunkConfig.model_fields["megabytes_per_shard"].default
_INDEX_BUDGET: int = VectorIndexSettings.model_fields["memory_budget"].default
_INDEX_BLOCK, _INDEX_FACTOR = 16_384, 3  # rows read at once; memory of building over that of the index
_LISTED_FROM = 2_048  # clusters of a domain
_ACROSS = (1 + REFINEMENTS) * NEAR_CELLS  # cells whose clusters a point is compared with in the end, each time counted
_ONE = "one task"


@dataclass(frozen=True)
class Workload:
    """What is run; all of it but the domains is an assumption. Batches and clusters are of 64, as they were measured.

    ``parts``: runs side by side, as far as their batches, among which the domains are shared out.
    """

    domains: tuple[int, ...] = DOMAINS
    parts: int = 1
    epochs: int = 3
    document_bytes: float = 600
    query_bytes: float = 100
    cluster_size: int = 64
    batch_size: int = 64
    cell_spread: float = 0.5  # standard deviation of the logarithm of a cell's points, in k-means of two levels
    cell_iterations: int = 18  # of k-means within a cell
    dimension: int = 384
    embedding_weights: float = 10.6e6  # of the layers of all-MiniLM-L6-v2
    embedders_per_gpu: int = 1  # workers of embed that share one, each with a core
    trained_dimension: int = 768
    trained_weights: float = 113e6  # of the layers of a BERT of 137 million weights
    operations: float = 8  # a weight and a token in training: two passes forward, as with a gradient cache, one back
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
        """Of both sides of all pairs, float16."""
        return 2 * 2 * self.pairs * self.dimension

    def pairs_of_parts(self) -> list[int]:
        """Domains from the largest on, each to the part that has fewest pairs then."""
        sizes = [0] * min(self.parts, len(self.domains))
        for domain in sorted(self.domains, reverse=True):
            heapq.heapreplace(sizes, sizes[0] + domain)
        return sizes


@dataclass(frozen=True)
class Machines:
    """Nodes, and what each has; all assumptions. Bytes and operations are those of a second."""

    nodes: int = 1
    cores: int = 96
    gpus: int = 8
    peak: float = 312e12  # of a GPU
    share: float = 0.4  # of the peak
    node_bandwidth: float = 2e9  # between a node and the store
    store_bandwidth: float = 20e9  # of the store, for all nodes together
    network: float = 50e9  # of a node, to the others

    @property
    def operations(self) -> float:
        """Of a GPU."""
        return self.peak * self.share


@dataclass(frozen=True)
class Phase:
    """Seconds of tasks that run side by side, one on a core or a GPU; the phase before is over when the first begins.

    ``slots``, ``largest``: what a phase waits for where all slots are busy, and where its longest task takes longer.
    ``workers_per_gpu``: 0 where tasks need a core alone. ``starts``: on new workers.
    """

    tasks: Sequence[float]
    largest: str = "the longest task"
    slots: str = "cores"
    workers_per_gpu: int = 0
    starts: bool = True


@dataclass(frozen=True)
class Stage:
    """``alone``: seconds by cause that are the same on any nodes. ``copied``: bytes that each node reads; ``shared``:
    bytes that are read or written once."""

    name: str
    phases: Sequence[Phase]
    alone: Mapping[str, float] = field(default_factory=dict)
    copied: float = 0
    shared: float = 0


def _collect(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    """One pass over a source: one task."""
    tasks = [size * calibration.collect for size in workload.pairs_of_parts()]
    return Stage("collect", [Phase(tasks, _ONE)], shared=workload.text_bytes * (1 + calibration.stored))


def _chunk(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    corpus_bytes = workload.passages * workload.passage_bytes
    chunked = ceil(corpus_bytes / _CHUNKED_BYTES)
    return Stage("chunk", [Phase([corpus_bytes * calibration.chunk / chunked] * chunked)], shared=2 * corpus_bytes)


@dataclass(frozen=True)
class Embedding:
    """An encoder on a GPU: seconds that it computes a token, numbers of a vector, and workers that share the GPU."""

    of_token: float
    dimension: int
    per_gpu: int = 1


def embedding_stage(
    name: str, texts: Sequence[tuple[int, float]], encoder: Embedding, calibration: Calibration
) -> Stage:
    """``texts``: how many, bytes of one. One thread tokenizes for a worker."""
    computing = encoder.of_token * encoder.per_gpu
    of_token = max(calibration.tokenize, computing)
    tasks, stored, vectors = [], 0.0, 0.0
    for count, size in texts:
        number = ceil(count / TEXTS_PER_VECTOR_FILE)
        tasks += [count / number * size / calibration.bytes_per_token * of_token] * number
        stored, vectors = stored + count * size * calibration.stored, vectors + count * encoder.dimension * 2
    slots = "GPUs" if computing >= calibration.tokenize else "tokenizing"
    return Stage(name, [Phase(tasks, slots=slots, workers_per_gpu=encoder.per_gpu)], copied=stored, shared=vectors)


def _pairs(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    """N. Judgments joined with ids, and pairs with one another, in a task each; hashes of stretches of texts."""
    alone, hashing = [], []
    for size in workload.pairs_of_parts():
        number, files = 2 * ceil(size / _HASHED_TEXTS), ceil(size / _ROWS_PER_FILE)
        joining, all_hashes = (seconds * size for seconds in calibration.of_pair("pairs"))
        alone.append(joining)
        hashing += [all_hashes / number + files * calibration.open_texts] * number
    copied = workload.text_bytes * calibration.stored
    return Stage("pairs", [Phase(hashing), Phase(alone, _ONE)], copied=copied)


def _cluster(workload: Workload, calibration: Calibration, machines: Machines) -> Stage:
    """N·√K in a domain of many clusters, N·K in one of few. A large domain's cells are tasks; a small one is a task."""
    lookup, _ = calibration.of_pair("cluster")
    small = [n for n in workload.domains if n <= LARGE_DOMAIN]
    phases = [Phase([workload.pairs * lookup], _ONE)]
    if small:
        phases.append(Phase([_clustering(n, workload, calibration) for n in small], "the largest domain"))
    sums = 0
    for n in (n for n in workload.domains if n > LARGE_DOMAIN):
        k, seconds = number_of_clusters(n, workload.cluster_size), _clustering(n, workload, calibration)
        parts = ceil(cell_sample(k) / PART_POINTS)
        finding = seconds * cell_sample(k) / n * workload.cell_iterations / (workload.cell_iterations + _ACROSS)
        phases.append(Phase([finding / parts] * parts, "the cells' sample", starts=False))
        phases.append(Phase(_of_cells(seconds - finding, isqrt(k), workload), "the largest cell", starts=False))
        sums += _ACROSS * k * workload.dimension * 8  # float64, which the driver adds up
    return Stage("cluster", phases, {"the driver": sums / machines.node_bandwidth}, copied=workload.vector_bytes)


def _clustering(n: int, workload: Workload, calibration: Calibration) -> float:
    """Seconds of one core for a domain of ``n`` pairs."""
    k = number_of_clusters(n, workload.cluster_size)
    if k <= KMeansSettings().two_level_above:
        return n * k * calibration.few_clusters
    _, of_pair = calibration.of_pair("cluster")
    return n * of_pair * sqrt(n / calibration.run_pairs)


def _of_cells(seconds: float, cells: int, workload: Workload) -> list[float]:
    """``seconds`` shared out among cells of lognormal sizes, in no order.

    Within a cell points are compared with as many clusters as is its share of the points; then with those nearby.
    """
    ranks = [(rank + 0.5) / cells for rank in range(cells)]
    sizes = [exp(workload.cell_spread * NormalDist().inv_cdf(rank)) for rank in ranks]
    mean = sum(sizes) / cells
    work = [size * (workload.cell_iterations * size / mean + _ACROSS) for size in sizes]
    random.Random(0).shuffle(work)
    return [seconds * of_cell / sum(work) for of_cell in work]


def _pack(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    """N, a large domain of an epoch being one task; before, its lists of neighbours, one too: K², or K·log K for many
    clusters. Joining the domains is left out."""
    lists = []
    for n in workload.domains:
        k = number_of_clusters(n, workload.cluster_size)
        of_cluster = k * calibration.exact_lists if k <= EXACT_UP_TO else log2(k) * calibration.graph_lists
        if k >= _LISTED_FROM:
            lists.append(k * workload.dimension * of_cluster)
    of_pair, _ = calibration.of_pair("pack")
    large = [n for n in workload.domains if n >= PART_PAIRS]
    small = workload.pairs - sum(large)
    parts = [n * of_pair for n in (*large, small) if n] * workload.epochs
    phases = [Phase(lists, "the largest domain")] if lists else []
    return Stage("pack", [*phases, Phase(parts, "the largest domain")], copied=workload.vector_bytes)


def _filter(workload: Workload, calibration: Calibration, machines: Machines) -> Stage:
    """N, and the files of all vectors opened once by each core, for the first run of batches that it makes."""
    alone, batches = [], []
    for size in workload.pairs_of_parts():
        lookup, masking = calibration.of_pair("filter")
        number = ceil(size / (_BATCHES_PER_SHARD * workload.batch_size))
        opening = 2 * ceil(size / TEXTS_PER_VECTOR_FILE) * calibration.open_vectors
        alone.append(size * lookup)
        runs = number * workload.epochs
        first = min(1.0, machines.nodes * machines.cores / runs)  # the share that are a core's first
        batches += [size * masking / number + opening * first] * runs
    copied = workload.vector_bytes + workload.text_bytes
    shared = workload.text_bytes * (1 + workload.epochs * calibration.stored)
    return Stage("filter", [Phase(alone, _ONE), Phase(batches)], copied=copied, shared=shared)


def training_stage(
    gpus: int,
    steps: float,
    computing: Mapping[str, float],
    tokens: float,
    exchange: float,
    stored: float,
    calibration: Calibration,
) -> Stage:
    """``computing``: seconds of a step by what a GPU does in them at once; ``tokens``: of a rank and step.

    Batches are read and tokenized while the step before is computed, by one thread of each rank. ``exchange``: seconds
    in which ranks send one another gradients, afterwards.
    """
    causes = {**computing, "tokenizing": tokens * calibration.tokenize}
    slowest = max(causes, key=lambda cause: causes[cause])
    working = Phase([steps * causes[slowest]] * gpus, slowest, slowest, workers_per_gpu=1)
    return Stage("train", [working], {"exchange of gradients": steps * exchange}, shared=stored)


def _shards(workload: Workload) -> int:
    """Of a flat index, each in a GiB of memory."""
    dimension = workload.trained_dimension
    room = (_INDEX_BUDGET - 2 * 4 * _INDEX_BLOCK * dimension) / (_INDEX_FACTOR * 4 * dimension)
    return ceil(workload.passages / room)


def _index(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    passages, dimension, shards = workload.passages, workload.trained_dimension, _shards(workload)
    opening = ceil(passages / TEXTS_PER_VECTOR_FILE) * calibration.open_vectors
    building = passages / shards * dimension * calibration.index + opening
    stored = passages * dimension * 4
    return Stage("index", [Phase([building] * shards)], copied=stored / 2, shared=stored)


def _search(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    """Blocks of queries against each shard."""
    passages, dimension, shards = workload.passages, workload.trained_dimension, _shards(workload)
    blocks = ceil(workload.queries / _QUERIES_PER_SHARD)
    searching = workload.queries / blocks * passages / shards * dimension * calibration.search
    return Stage("search", [Phase([searching] * shards * blocks)], shared=passages * dimension * 4)


def _evaluate(workload: Workload, calibration: Calibration, _machines: Machines) -> Stage:
    """Two runs judged in one task."""
    return Stage("evaluate", [Phase([2 * workload.queries * calibration.evaluate], _ONE)])


LAWS: Mapping[str, Callable[[Workload, Calibration, Machines], Stage]] = {
    "collect": _collect,
    "chunk": _chunk,
    "pairs": _pairs,
    "cluster": _cluster,
    "pack": _pack,
    "filter": _filter,
    "index": _index,
    "search": _search,
    "evaluate": _evaluate,
}
"""The jobs that need no GPU, by name."""


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
