"""What ``benchmarks.gpu_check`` checks: each on one device, with what held, was measured and is estimated."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.random_encoders import CASES, REHEARSED_CASES, Case
from benchmarks.random_models import OBJECTIVES, REAL, SMALL, Models, random_objective, run_settings, train_steps
from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.pair_vectors import ArrayPairs
from raytriever.reports.table import counted
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, encode_texts
from retrieval.encoders.specification import has_bfloat16
from retrieval.indexes import vector_index
from retrieval.indexes.faiss_factory import import_faiss
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.engine.sharding import shard
from trainers.estimate.machines import Machines
from trainers.estimate.made_up import token_counts
from trainers.estimate.outlines import text_of
from trainers.estimate.recipe import encoder_cost, seconds_of
from trainers.estimate.step import step_cost
from trainers.run_settings import RunSettings

ROOT = Path(__file__).parents[1]
_RANKS = 2
_MOST_MEMORY = 1.1  # of what is estimated
_SPEEDS = ("tokens/s", "GB/s")
_WARM_UP = 3  # steps that aren't timed
_FEWEST_ROWS = 4


@dataclass(frozen=True)
class Size:
    """How much is computed. ``points``, ``clusters``, ``width``: of k-means and indexes; ``sent``: numbers that ranks
    add up; ``cases``: what others are compared over."""

    models: Models
    steps: int
    texts: int
    points: int
    clusters: int
    width: int
    sent: int
    tests: str
    cases: Mapping[str, Case]


ON_GPU = Size(REAL, 50, 8192, 100_000, 500, 256, 1 << 26, "tests/gpu", CASES)
REHEARSED = Size(SMALL, 5, 64, 2_000, 20, 16, 1 << 12, "tests/gpu/test_one_rank.py", REHEARSED_CASES)


@dataclass(frozen=True)
class Finding:
    """``held``: None where it was left out, as ``note`` says. ``expected``: by the estimate, in the same units."""

    held: bool | None
    note: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0

    @property
    def slower(self) -> float | None:
        """How many times slower than estimated; None where it isn't, or where nothing is estimated."""
        known = [key for key in _SPEEDS if key in self.figures and key in self.expected]
        ratio = max((self.expected[key] / self.figures[key] for key in known), default=0)
        return ratio if ratio > 1 else None


@dataclass
class Bench:
    """Where all is checked. ``gpu``: None where the estimate doesn't know it; ``until``: when the check is to end;
    ``so_far``: figures that are kept of a check that is stopped."""

    device: torch.device
    size: Size
    folder: Path
    gpu: Machines | None = None
    until: float = float("inf")
    so_far: dict[str, float] = field(default_factory=dict)

    @property
    def bf16(self) -> bool:
        """Whether the device has it; CPUs rehearse in float32."""
        return self.device.type == "cuda" and has_bfloat16(gpu=True)

    def left(self) -> float:
        """Seconds."""
        return max(1.0, self.until - time.monotonic())


Check = Callable[[Bench], Finding]


def check_tests(bench: Bench) -> Finding:
    """The tests that are marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", bench.size.tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=bench.left())
    lines = [line for line in done.stdout.splitlines() if line] or done.stderr.splitlines() or [""]
    counts = {word: float(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    if done.returncode in (0, 5) and not counts.get("passed"):
        return Finding(None, f"left out: no test ran, as none has a GPU ({lines[-1].strip('= ')})", counts)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Finding(done.returncode == 0, "; ".join(failed[:5]) or lines[-1] * bool(done.returncode), counts)


def check_resume(bench: Bench) -> Finding:
    """A run that is resumed from a checkpoint takes the steps that it would have taken."""
    steps, before = 6, 3
    settings, shape = run_settings("contrastive", bench.size.models, bench.folder, bf16=bench.bf16)
    curves = []
    for folder, lengths in (("whole", [steps]), ("resumed", [before, steps])):
        for length in lengths:
            kept = Checkpoints(str(bench.folder / folder), {})
            objective = random_objective(settings, shape, bench.device)
            points = train_steps(objective, settings, shape, length, kept)
        curves.append([point["loss"] for point in points][-(steps - before) :])
    whole, resumed = (np.array(curve) for curve in curves)
    apart = float(np.abs(resumed / whole - 1).max())
    same = apart <= (1e-2 if bench.device.type == "cuda" else 0)  # where kernels add up in any order
    return Finding(same, f"losses of steps {before + 1} to {steps}: {apart:.1g} apart", {"apart": apart})


def check_embedding(bench: Bench) -> Finding:
    """Vectors of the device are those of the CPU in float32."""
    settings, shape = run_settings("contrastive", bench.size.models, bench.folder)
    encoder = random_objective(settings, shape, torch.device("cpu")).encoder("document").eval()
    counts = token_counts(bench.size.texts, shape.document_tokens)
    texts = [text_of(tokens, number) for number, tokens in enumerate(counts)]
    expected = encode_texts(encoder, texts[:16], "document")
    encoder = encoder.to(bench.device, torch.bfloat16 if bench.bf16 else torch.float32)
    budget = TOKENS_ON_CPU if bench.device.type == "cpu" else TOKENS_ON_GPU
    found = encode_texts(encoder, texts[:16], "document", token_budget=budget)  # kernels are loaded in it
    started = time.perf_counter()
    encode_texts(encoder, texts, "document", token_budget=budget)
    figures = {"tokens/s": sum(counts) / (time.perf_counter() - started)}
    estimated = {}
    if bench.gpu is not None:
        estimated = {"tokens/s": 1 / encoder_cost(settings.encoder, None, bench.gpu).of_token}
    apart = [each - expected.mean(axis=0) for each in (found, expected)]
    cosines = (apart[0] * apart[1]).sum(axis=1) / np.prod([np.linalg.norm(each, axis=1) for each in apart], axis=0)
    figures["least cosine"] = float(cosines.min())
    return Finding(
        bool(cosines.min() > 0.98), "cosines with float32 on the CPU, the mean taken off", figures, estimated
    )


def check_clustering(bench: Bench) -> Finding:
    """Clusters are those of the CPU, exactly."""
    size = bench.size
    sides = np.random.default_rng(0).normal(size=(2, size.points, size.width)).astype(np.float16)
    seconds, found = {}, {}
    for device in (str(bench.device), "cpu"):
        started = time.perf_counter()
        pairs = ArrayPairs(queries=sides[0], documents=sides[1])
        found[device] = cluster_pairs(pairs, size.clusters, KMeansSettings(), seed=1, device=device)
        seconds[f"seconds on {device}"] = time.perf_counter() - started
    same = all(np.array_equal(each.assignments, found["cpu"].assignments) for each in found.values())
    return Finding(same, f"{size.points:,} pairs in {size.clusters:,} clusters", seconds)


def check_index(bench: Bench) -> Finding:
    """FAISS on the GPU finds what it finds on the CPU."""
    if find_spec("faiss") is None:
        return Finding(None, "left out: FAISS isn't installed; raytriever[gpu] brings it")
    faiss = import_faiss()
    gpu = bench.device.type == "cuda" and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
    if bench.device.type == "cuda" and not gpu:
        return Finding(None, "left out: this FAISS has no GPU; raytriever[gpu] brings one that does")
    size, factory = bench.size, "IVF16,Flat"
    vectors = np.random.default_rng(0).normal(size=(size.points, size.width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    trained = vector_index.train(vectors, factory, seed=0, gpu=gpu)
    index = vector_index.build_shard([vectors], factory, trained=trained, gpu=gpu)
    vector_index.set_search_parameters(index, "nprobe=16")
    seconds, rows = {}, []
    for place in (gpu, False):
        started = time.perf_counter()
        rows.append(vector_index.search_shard(index, vectors[:1000], 10, gpu=place).rows)
        seconds[f"queries/s on {'the GPU' if place else 'the CPU'}"] = 1000 / (time.perf_counter() - started)
    same = float((rows[0] == rows[1]).mean())
    itself = float((rows[0][:, 0] == np.arange(1000)).mean())
    note = f"{same:.1%} of the rankings are the CPU's; {itself:.1%} of the vectors find themselves first"
    return Finding(same > 0.99 and itself > 0.99, note, seconds)


def check_ranks(bench: Bench) -> Finding:
    """NCCL, and FSDP2 against whole weights on each of two GPUs; of CPUs gloo rehearses it."""
    if bench.device.type == "cuda" and torch.cuda.device_count() < _RANKS:
        return Finding(None, "left out: NCCL and FSDP2 between GPUs need two of them, and there is one")
    if bench.device.type not in ("cuda", "cpu"):
        return Finding(None, f"left out: ranks are on GPUs or CPUs, and this device is {bench.device.type}")
    (bench.folder / "ranks").mkdir()
    started = spawn(_rank, (replace(bench),), _RANKS, join=False)
    assert started is not None, "without joining there is a context"
    deadline = time.monotonic() + bench.left()
    try:
        while not started.join(timeout=1):
            if time.monotonic() > deadline:
                return Finding(False, "the ranks didn't end in the time that was left: does one wait for another?")
    finally:
        for process in started.processes:
            process.kill()
    found = json.loads((bench.folder / "ranks" / "found.json").read_text())
    apart = float(np.abs(np.array(found["sharded"]) / np.array(found["replicated"]) - 1).max())
    expected = {"GB/s": bench.gpu.link} if bench.gpu else {}
    note = f"an all-reduce, and losses of sharded weights that are {apart:.1g} apart from those of whole ones"
    return Finding(apart < 1e-2 and found["sum"], note, {"GB/s": found["GB/s"], "apart": apart}, expected)


def _rank(rank: int, bench: Bench) -> None:
    """One of the processes of ``check_ranks``."""
    folder, device = bench.folder / "ranks", torch.device(bench.device.type, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=_RANKS)
    numbers = torch.zeros(bench.size.sent, device=device)
    for _ in range(_WARM_UP):
        dist.all_reduce(numbers)
    float(numbers.fill_(rank + 1.0)[0])  # waits for the device
    started = time.perf_counter()
    dist.all_reduce(numbers)
    float(numbers[0])
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {"sum": bool((numbers == sum(range(1, _RANKS + 1))).all())}
    found["GB/s"] = 2 * (_RANKS - 1) / _RANKS * numbers.nbytes / seconds / 1e9  # that each rank sends
    for sharding in ("replicated", "sharded"):
        training = {"bf16": bench.bf16, "batches_per_step": _RANKS}
        settings, shape = run_settings("contrastive", bench.size.models, bench.folder / f"rank {rank}", **training)
        objective = random_objective(settings, shape, device)
        if sharding == "sharded":
            shard(objective, bf16=bench.bf16)
        found[sharding] = [point["loss"] for point in train_steps(objective, settings, shape, _WARM_UP)]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def peak_memory(device: torch.device) -> float | None:
    """Bytes of tensors since it was reset; None where the device doesn't count them."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def with_chunks_of(device: torch.device, settings: RunSettings) -> RunSettings:
    """The settings with the chunks that are the default on ``device`` written out: what is counted is on none."""
    objective = settings.objective
    if device.type == "cpu" or objective.chunk_size is not None or objective.chunk_tokens is not None:
        return settings
    chunked = objective.model_copy(update={"chunk_tokens": CHUNK_TOKENS_ON_GPU})
    return settings.model_copy(update={"objective": chunked})


def check_objective(name: str, bench: Bench) -> Finding:
    """Steps with random weights: memory within the estimate; tokens a second and utilisation (MFU)."""
    settings, shape = run_settings(name, bench.size.models, bench.folder, bf16=bench.bf16)
    settings = with_chunks_of(bench.device, settings)
    cost = step_cost(settings, shape)
    while bench.gpu and bench.gpu.needs(cost.peak) > bench.gpu.gib:
        if shape.rows <= _FEWEST_ROWS:
            return Finding(None, f"left out: {bench.gpu.needs(cost.peak):.1f} of {bench.gpu.gib} GiB are needed")
        shape = replace(shape, rows=shape.rows // 2)
        cost = step_cost(settings, shape)
    objective = random_objective(settings, shape, bench.device)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    points = train_steps(objective, settings, shape, bench.size.steps, until=bench.until)
    timed, memory = points[_WARM_UP:], peak_memory(bench.device)
    figures, expected = {"rows": float(shape.rows)}, {"GiB": cost.peak / 2**30}
    if timed:
        tokens, seconds = (sum(point[key] for point in timed) for key in ("tokens", "seconds"))
        figures["tokens/s"] = tokens / seconds
        if "peak_seconds" in timed[0]:
            figures["MFU"] = sum(point["peak_seconds"] for point in timed) / seconds
        if bench.gpu is not None:
            expected["tokens/s"] = tokens / len(timed) / max(seconds_of(cost, settings, bench.gpu).values())
    note = f"time for {len(points)} of {counted(bench.size.steps, 'step')}" * (len(points) < bench.size.steps)
    if memory is not None:
        figures["GiB"] = memory / 2**30
        if memory > _MOST_MEMORY * cost.peak:
            note = f"{memory / cost.peak:.2f} times the memory that is estimated"
            return Finding(False, note, figures, expected)
    return Finding(True if timed else None, note, figures, expected)


CHECKS: dict[str, Check] = {
    "tests marked gpu": check_tests,
    "resume": check_resume,
    "embedding": check_embedding,
    "k-means": check_clustering,
    "FAISS": check_index,
    "NCCL and FSDP2": check_ranks,
    **{f"train: {name}": partial(check_objective, name) for name in OBJECTIVES},
}
