"""What stages cost, tasks in seconds and bytes.

Work follows the laws of the algorithms in the number of pairs; tasks are cut as the jobs cut them. Constants of the
laws are measured (``Calibration``); what is run, and on what, is given (``Size``, ``Machines``).
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isqrt, sqrt

from pipelines.clustering.kmeans import NEAR_CELLS, REFINEMENTS, KMeansSettings, cell_sample, number_of_clusters
from pipelines.clustering.points import PART_POINTS
from pipelines.jobs.chunk import ChunkConfig
from pipelines.jobs.cluster import LARGE_DOMAIN, MOST_AT_ONCE, WORKERS_OF_A_DOMAIN
from pipelines.jobs.collect import CollectConfig
from pipelines.jobs.filter import FilterConfig
from pipelines.jobs.lookups import ROWS_OF_A_LOOKUP
from pipelines.jobs.mine import MineConfig
from pipelines.jobs.pairs import PairsConfig
from pipelines.packing.pack import PackingSettings, number_of_regions
from raytriever.prefetching import TOKENIZING_THREADS
from retrieval.jobs.embed import MOST_SHARDS, ON_GPU
from retrieval.jobs.index import LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.search import SearchConfig
from trainers.estimate.machines import Machines

# the jobs' defaults
_TEXTS_PER_VECTOR_FILE = ON_GPU["texts_per_shard"]
_HASHED_TEXTS: int = PairsConfig.model_fields["texts_per_shard"].default
_PAIRS_PER_FILE: int = PairsConfig.model_fields["rows_per_file"].default
_COLLECTED_BYTES: int = CollectConfig.model_fields["bytes_per_shard"].default
_BATCHES_PER_SHARD: int = FilterConfig.model_fields["batches_per_shard"].default
_QUERIES_PER_SHARD: int = SearchConfig.model_fields["queries_per_shard"].default
_CANDIDATES_PER_SHARD: int = MineConfig.model_fields["candidates_per_shard"].default
_CHUNKED_BYTES: float = 1e6 * ChunkConfig.model_fields["megabytes_per_shard"].default
_INDEX_BUDGET: int = VectorIndexSettings.model_fields["memory_budget"].default
_INDEXED_DOCUMENTS: int = LexicalIndexSettings.model_fields["documents_per_shard"].default
_INDEX_BLOCK, _INDEX_FACTOR = 16_384, 3  # rows read at once; memory of building over that of the index
_REGION_PAIRS: int = PackingSettings.model_fields["region_pairs"].default
_ACROSS = (1 + REFINEMENTS) * NEAR_CELLS  # cells whose clusters a point is compared with in the end, each time counted
_MEASURED_PAIRS = 10_000_000
_ONE = "one task"
CANDIDATE = 12
"""Bytes of a list's entry on disk."""


@dataclass(frozen=True)
class Calibration:
    """Seconds of one core where nothing else is said; docs/scale.md and docs/benchmarks.md say how they were measured.

    Each is for the unit named behind it, of jobs one of ten million pairs, measured on two busy cores.
    """

    pairs: float = 68 / _MEASURED_PAIRS
    pairs_phases: tuple[float, ...] = (0.22, 0.58, 0.2)  # what of that each phase takes
    related: float = 94  # bytes of a pair: 47 that the phases of pairs write, and read again
    cluster: float = 767 * 2 / _MEASURED_PAIRS
    cluster_rows: float = 0.11e-6  # a pair whose rows are put where all workers find them
    pack: float = 144 * 2 / _MEASURED_PAIRS  # of regions
    filter: float = 246 * 2 / _MEASURED_PAIRS
    few_clusters: float = 11 / (100_000 * 1_563)  # k-means in one level: a pair and a cluster
    collect: tuple[float, ...] = (31e-6, 2.4e-6, 3.2e-6)  # a pair: read, compared, written
    handed_on: float = 0.83  # bytes of what collect's tasks hand on, over those of the texts
    chunk: float = 1 / 36e6  # a byte of text
    tokenize: float = 1 / 495e3  # a token
    divide: float = 0.2e-6  # a pair of a large domain, put with those of its region
    words_index: float = 162e-9  # a byte of text for BM25: 231,000 passages of 353 bytes in 13.2 s
    words_search: float = 2.9e-9  # a query and a passage of those, in 0.67 ms a query
    shuffle: float = 0.33e-6  # a pair of an epoch of random batches, of a million
    keys: float = 16e-9  # a byte of those passages, hashed for mining
    mine: float = 0.56e-6  # a candidate of 20,000 queries, 100 each, by the scores of their run
    group: float = 32e-6  # a chunk of a batch
    fuse: float = 0.86e-6  # a result of two rankings
    rerank: float = 8e-9  # a candidate and a dimension
    index: float = 2 * 10 / (1e6 * 384)  # a vector and a dimension
    search: float = 2 * 10 / (1e3 * 1e6 * 384)  # a query, a vector and a dimension
    evaluate: float = 7.1 / (2 * 10_000)  # a query of a run, with 100 results
    open_vectors: float = 115e-6  # a file of vectors, mapped
    task: float = 5e-3  # of the driver, for each task: 9.9 s for 2,000 that do nothing
    start_up: float = 5.0  # by the clock, of new workers
    bytes_per_token: float = 4.6
    stored: float = 0.42  # bytes of texts as they are stored over those of the texts
    cell_iterations: int = 18  # of k-means within a cell
    sums: float = 1.9  # that reach the driver for each cluster, over all refinements, of 400,000 pairs


@dataclass(frozen=True)
class Size:
    """What a stage reads and writes; 0 is unknown, or that there are none.

    ``splits``: queries and judged pairs of each. ``batches``, ``pairs``: of an epoch, ``domains`` dividing the pairs.
    ``rows``, ``negatives``, ``candidates``: of a batch, of one of its rows.
    """

    documents: float = 0
    document_bytes: float = 0
    query_bytes: float = 0
    splits: Mapping[str, list[int]] = field(default_factory=dict)
    pairs: float = 0
    domains: tuple[int, ...] = ()
    batches: float = 0
    rows: int = 0
    epochs: int = 1
    negatives: int = 0
    candidates: int = 0
    cluster_size: int = 0
    dimension: int = 0
    results: float = 0

    @property
    def row_bytes(self) -> float:
        """Of a batch's row, as texts."""
        return self.document_bytes * (1 + self.negatives) + self.query_bytes + CANDIDATE * self.candidates

    @property
    def text_bytes(self) -> float:
        """Of all pairs."""
        return self.pairs * (self.document_bytes + self.query_bytes)

    @property
    def vector_bytes(self) -> float:
        """Of both sides of all pairs, float16."""
        return 2 * 2 * self.pairs * self.dimension

    def queries(self, split: str | None = None) -> float:
        """Of one split, or of all."""
        chosen = [self.splits[split]] if split is not None and split in self.splits else self.splits.values()
        return sum(of[0] for of in chosen)


@dataclass(frozen=True)
class Phase:
    """Seconds of tasks that run side by side, one on a core or a GPU; the phase before is over when the first begins.

    ``slots``, ``largest``: what a phase waits for where all slots are busy, and where its longest task takes longer.
    ``workers_per_gpu``: 0 where tasks need a core alone. ``starts``: on new workers, not on an earlier stage's.
    """

    tasks: Sequence[float]
    largest: str = "the longest task"
    slots: str = "cores"
    workers_per_gpu: int = 0
    starts: bool = False


@dataclass(frozen=True)
class Stage:
    """``alone``: seconds by cause that are the same on any nodes. ``copied``: bytes that each node reads, by what they
    are of; ``shared``: bytes that are read or written once."""

    name: str
    phases: Sequence[Phase]
    alone: Mapping[str, float] = field(default_factory=dict)
    copied: Mapping[str, float] = field(default_factory=dict)
    shared: float = 0


def _collect(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """Pieces are read, all ids compared, pieces written."""
    pieces = ceil(size.text_bytes / _COLLECTED_BYTES)
    numbers = pieces, 1, pieces
    tasks = [[size.pairs * each / number] * number for each, number in zip(calibration.collect, numbers, strict=True)]
    shared = size.text_bytes * (1 + 2 * calibration.handed_on + calibration.stored)
    return Stage("collect", [Phase(tasks[0], starts=True), *map(Phase, tasks[1:])], shared=shared)


def _chunk(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    corpus_bytes = size.documents * size.document_bytes
    chunked = ceil(corpus_bytes / _CHUNKED_BYTES)
    return Stage("chunk", [Phase([corpus_bytes * calibration.chunk / chunked] * chunked)], shared=2 * corpus_bytes)


@dataclass(frozen=True)
class Embedding:
    """An encoder on a GPU: seconds that it computes a token, numbers of a vector, and workers that share the GPU.

    ``peak``: bytes of the GPU.
    """

    of_token: float
    dimension: int
    per_gpu: int = 1
    peak: float = 0


def embedding_stage(
    name: str, texts: Sequence[tuple[int, float]], encoder: Embedding, calibration: Calibration, machines: Machines
) -> Stage:
    """``texts``: how many, bytes of one. Two threads tokenize for a worker, where it has as many cores."""
    computing = encoder.of_token * encoder.per_gpu
    threads = min(TOKENIZING_THREADS, machines.cores / (machines.gpus * encoder.per_gpu))
    tokenizing = calibration.tokenize / threads
    of_token = max(tokenizing, computing)
    tasks, stored, vectors = [], 0.0, 0.0
    for count, size in texts:
        number = _vector_files(count)
        tasks += [count / number * size / calibration.bytes_per_token * of_token] * number
        stored, vectors = stored + count * size * calibration.stored, vectors + count * encoder.dimension * 2
    slots = "GPUs" if computing >= tokenizing else "tokenizing"
    encoding = Phase(tasks, slots=slots, workers_per_gpu=encoder.per_gpu, starts=True)
    return Stage(name, [encoding], shared=stored + vectors)


def _vector_files(texts: float) -> int:
    return min(MOST_SHARDS, ceil(texts / _TEXTS_PER_VECTOR_FILE))


def _vectors_of(size: Size) -> dict[str, float]:
    return {"vectors": size.vector_bytes}


def _pairs(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """N. Texts are hashed in stretches; before and behind, one node joins and orders."""
    texts = 2 * ceil(size.pairs / _HASHED_TEXTS)
    numbers = zip(calibration.pairs_phases, (1, texts, 1), strict=True)
    phases = [Phase([size.pairs * share * calibration.pairs / number] * number) for share, number in numbers]
    return Stage("pairs", phases, shared=size.text_bytes * calibration.stored + size.pairs * calibration.related)


def _cluster(size: Size, calibration: Calibration, machines: Machines) -> Stage:
    """N·√K in a domain of many clusters, N·K in one of few. A small domain is a task. Of large ones, some of which are
    clustered side by side, the cells are tasks."""
    small = [n for n in size.domains if n <= LARGE_DOMAIN]
    large = sorted((n for n in size.domains if n > LARGE_DOMAIN), reverse=True)
    phases = [_by_domain(size, calibration)]
    if small:
        phases.append(Phase([_clustering(n, size, calibration) for n in small], "the largest domain"))
    sums, workers = 0.0, machines.nodes * machines.cores
    at_once = max(1, min(MOST_AT_ONCE, workers // WORKERS_OF_A_DOMAIN))
    for first in range(0, len(large), at_once):
        sampling, refining = list[float](), list[float]()
        for n in large[first : first + at_once]:
            k, seconds = number_of_clusters(n, size.cluster_size), _clustering(n, size, calibration)
            parts, sample = ceil(cell_sample(k) / PART_POINTS), cell_sample(k) / n
            finding = seconds * sample * calibration.cell_iterations / (calibration.cell_iterations + _ACROSS)
            sampling += [finding / parts] * parts
            refining += _of_cells(seconds - finding, isqrt(k), calibration)
            sums += calibration.sums * k * size.dimension * 8  # float64, which the driver adds up
        phases += [Phase(sampling, "the cells' sample"), Phase(refining, "the largest cell")]
    return Stage("cluster", phases, {"the driver": sums / machines.node_bandwidth}, copied=_vectors_of(size))


def _clustering(n: int, size: Size, calibration: Calibration) -> float:
    """Seconds of one core for a domain of ``n`` pairs."""
    k = number_of_clusters(n, size.cluster_size)
    if k <= KMeansSettings().two_level_above:
        return n * k * calibration.few_clusters
    return n * calibration.cluster * sqrt(n / _MEASURED_PAIRS)


def _of_cells(seconds: float, cells: int, calibration: Calibration) -> list[float]:
    """``seconds`` shared out among cells in no order, of any size from half the largest on: larger ones are divided.

    Within a cell points are compared with as many clusters as is its share of the points; then with those nearby.
    """
    points = [0.5 + 0.5 * rank / cells for rank in range(cells)]
    mean = sum(points) / cells
    work = [each * (calibration.cell_iterations * each / mean + _ACROSS) for each in points]
    random.Random(0).shuffle(work)
    return [seconds * of_cell / sum(work) for of_cell in work]


def _pack(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """N: a large domain's regions are a task each, of every epoch, small domains as many as fill one. Dividing a large
    domain is a task, and so is a share of what its regions have set aside, at most all."""
    dividing, packing, dealt, small = list[float](), list[float](), list[float](), 0
    for n in size.domains:
        regions = number_of_regions(n, number_of_clusters(n, size.cluster_size), _REGION_PAIRS)
        if regions > 1:
            dividing.append(n * calibration.divide)
            packing += [n / regions * calibration.pack] * regions
            dealt += [n / regions * calibration.shuffle] * regions
        else:
            small += n
    parts = ceil(small / _REGION_PAIRS)
    packing += [small / parts * calibration.pack] * parts if parts else []
    phases = [Phase(dividing, "the largest domain")] if dividing else []
    phases.append(Phase(packing * size.epochs, "the largest region"))
    if dealt:
        phases.append(Phase(dealt * size.epochs, "the largest region"))
    return Stage("pack", phases, copied=_vectors_of(size))


def _random_pack(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """N: pairs are put by domain, by parts, then shuffled by regions in every epoch."""
    regions = ceil(size.pairs / _REGION_PAIRS)
    shuffled = Phase([size.pairs * calibration.shuffle / regions] * regions * size.epochs)
    phases = [_by_domain(size, calibration), shuffled] if regions > 1 else [shuffled]
    return Stage("pack", phases, shared=size.pairs * size.epochs)


def _by_domain(size: Size, calibration: Calibration) -> Phase:
    """Pairs are put by domain, as many files' together as make a task."""
    tasks = ceil(size.pairs / max(_PAIRS_PER_FILE, ROWS_OF_A_LOOKUP))
    return Phase([size.pairs * calibration.cluster_rows / tasks] * tasks)


def _filter(size: Size, calibration: Calibration, machines: Machines) -> Stage:
    """N, and the files of all vectors opened once by each core, for the first run of batches that it makes."""
    number = ceil(size.pairs / (_BATCHES_PER_SHARD * size.rows))
    opening = 2 * _vector_files(size.pairs) * calibration.open_vectors
    runs = number * size.epochs
    first = min(1.0, machines.nodes * machines.cores / runs)  # the share that are a core's first
    batches = [size.pairs * calibration.filter / number + opening * first] * runs
    copied = _vectors_of(size) | {"texts": size.text_bytes}
    shared = size.text_bytes * (1 + size.epochs * calibration.stored)
    return Stage("filter", [Phase(batches)], copied=copied, shared=shared)


def training_stage(gpus: int, steps: float, causes: Mapping[str, float], exchange: float, stored: float) -> Stage:
    """``causes``: seconds of a step by what happens in them at once.

    Batches are read and tokenized while the step before is computed, by threads of each rank. ``exchange``: seconds in
    which ranks send one another gradients, afterwards.
    """
    slowest = max(causes, key=lambda cause: causes[cause])
    working = Phase([steps * causes[slowest]] * gpus, slowest, slowest, workers_per_gpu=1, starts=True)
    return Stage("train", [working], {"exchange of gradients": steps * exchange}, shared=stored)


def _shards(size: Size) -> int:
    """Of a flat index, each in a GiB of memory."""
    dimension = size.dimension
    room = (_INDEX_BUDGET - 2 * 4 * _INDEX_BLOCK * dimension) / (_INDEX_FACTOR * 4 * dimension)
    return ceil(size.documents / room)


def _query_blocks(size: Size) -> int:
    """Searched, fused or ranked anew apart."""
    return ceil(size.queries() / _QUERIES_PER_SHARD)


def _index(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    passages, dimension, shards = size.documents, size.dimension, _shards(size)
    opening = _vector_files(passages) * calibration.open_vectors
    building = passages / shards * dimension * calibration.index + opening
    stored = passages * dimension * 4
    return Stage("index", [Phase([building] * shards)], copied={"half vectors": stored / 2}, shared=stored)


def _search(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """Blocks of queries against each shard."""
    passages, dimension, shards = size.documents, size.dimension, _shards(size)
    blocks = _query_blocks(size)
    searching = size.queries() / blocks * passages / shards * dimension * calibration.search
    return Stage("search", [Phase([searching] * shards * blocks)], shared=passages * dimension * 4)


def _words_index(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    texts, number = size.documents * size.document_bytes, ceil(size.documents / _INDEXED_DOCUMENTS)
    return Stage("index", [Phase([texts * calibration.words_index / number] * number)], shared=texts)


def _words_search(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """Every document's score is added up for each query."""
    number = _query_blocks(size) * ceil(size.documents / _INDEXED_DOCUMENTS)
    return Stage("search", [Phase([size.queries() * size.documents * calibration.words_search / number] * number)])


def _mine(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """All texts are hashed, then candidates read, by blocks of queries."""
    texts, blocks = size.documents * size.document_bytes, ceil(size.results / _CANDIDATES_PER_SHARD)
    tasks = [texts * calibration.keys, *[size.results * calibration.mine / blocks] * blocks]
    return Stage("mine", [Phase(tasks)], copied={"corpus": texts * calibration.stored})


def _evaluate(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """Two runs judged in one task."""
    return Stage("evaluate", [Phase([2 * size.queries() * calibration.evaluate], _ONE)])


def _group(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    """Batches are copied by runs of them."""
    runs = size.epochs * ceil(size.pairs / (_BATCHES_PER_SHARD * size.rows))
    tasks = [size.epochs * size.pairs * calibration.group / runs] * runs
    return Stage("group", [Phase(tasks)], copied={"chunks": size.pairs * size.document_bytes * calibration.stored})


def _fuse(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    blocks = _query_blocks(size)
    return Stage("fuse", [Phase([size.results * calibration.fuse / blocks] * blocks)])


def _rerank(size: Size, calibration: Calibration, _machines: Machines) -> Stage:
    blocks, scored = _query_blocks(size), size.results * size.dimension * calibration.rerank
    return Stage("rerank", [Phase([scored / blocks] * blocks)])


def _brief(_size: Size, _calibration: Calibration, _machines: Machines) -> Stage:
    """A few texts, tables or orders."""
    return Stage("brief", [Phase([0], _ONE)])


LAWS: Mapping[str, Callable[[Size, Calibration, Machines], Stage]] = {
    "collect": _collect,
    "chunk": _chunk,
    "pairs": _pairs,
    "cluster": _cluster,
    "pack": _pack,
    "random pack": _random_pack,
    "filter": _filter,
    "index": _index,
    "search": _search,
    "words index": _words_index,
    "words search": _words_search,
    "mine": _mine,
    "evaluate": _evaluate,
    "group": _group,
    "fuse": _fuse,
    "rerank": _rerank,
    **dict.fromkeys(("lists", "mix", "context", "table", "report"), _brief),
}
"""The jobs that need no GPU, by name; of BM25 with ``words`` before it, of random batches alone with ``random``."""


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
    copied = sum(stage.copied.values())
    of_node = (copied + stage.shared / busy) / machines.node_bandwidth
    of_store = (copied * busy + stage.shared) / machines.store_bandwidth
    found["the store" if of_store > of_node else "a node's reading"] += max(of_node, of_store)
    return found
