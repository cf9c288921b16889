"""k-means over pairs: time, memory and hardness against FAISS on materialised copies; two levels against flat.

    python -m benchmarks.kmeans faiss --pairs 200000 --clusters 782 --iterations 25 --polish-sweeps 2
    python -m benchmarks.kmeans levels --pairs 1000000 --clusters 16384 --iterations 25 --flat-iterations 2
    python -m benchmarks.kmeans levels --pairs 131072 --clusters 8192 --iterations 10

``faiss`` clusters [q; d] and [d; q] of all pairs as the authors of Contextual Document Embeddings do, with nothing
left out of the training. Every side runs in a process of its own, one seed, no early stop; sides take turns for
``--rounds``, the fastest counts. Memory is the largest resident set beyond the vectors given, which are in memory.

``levels`` runs both sides for ``--iterations``. With ``--flat-iterations`` f flat runs for f - 1 and f only, and its
time for all of them is extrapolated from the difference (similarities are then not compared). Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.lloyd import cluster_sums
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.clustering.points import BLOCK_ROWS
from pipelines.filtering.false_negatives import batch_hardness
from pipelines.packing.pack import PackingSettings, pack
from retrieval.indexes.faiss_factory import import_faiss

Vectors = NDArray[np.floating]
Figures = dict[str, float]
_BLOCK = 16_384
_BRANCHES = 10  # topics of the tree below each topic above them
_TOPIC_SHARES = (0.10, 0.10, 0.12, 0.12)  # of a vector's square, level by level
_PAIR_SHARE, _SIDE_SHARE, _OFFSET = 0.28, 0.28, 0.25  # of the pair, of each side, between the sides


def main() -> None:
    """Makes vectors, runs the sides in processes of their own, prints ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", choices=["faiss", "levels"])
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--clusters", type=int, default=782)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--flat-iterations", type=int, default=0, help="extrapolate flat from so many, at least 2")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--polish-sweeps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--half", action="store_true", help="vectors in half precision, as `embed` stores them")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        _run_side(arguments)
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = folder
        queries, documents = make_pairs(arguments.pairs, arguments.dimension)
        dtype = np.float16 if arguments.half else np.float32
        for name, vectors in (("queries", queries), ("documents", documents)):
            np.save(Path(folder) / f"{name}.npy", vectors.astype(dtype))
        if arguments.against == "faiss":
            _against_faiss(arguments, queries, documents)
        else:
            _against_flat(arguments, queries, documents)


def make_pairs(pairs: int, dimension: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Queries and documents of unit length in a tree of topics, a constant apart, with a spectrum that falls.

    Mean products, as MiniLM's of question-answer pairs: about 0.7 within a pair, 0.4 within a topic, 0 beyond.
    """
    random = np.random.default_rng(0)
    spectrum = ((1 + np.arange(dimension)) ** -0.25).astype(np.float32)
    leaves = _BRANCHES ** len(_TOPIC_SHARES)
    topic_of = random.choice(leaves, pairs, p=random.dirichlet(np.ones(leaves)))
    offset = _OFFSET * random.standard_normal(dimension, dtype=np.float32)
    levels = [
        np.float32(share**0.5) * random.standard_normal((_BRANCHES ** (level + 1), dimension), dtype=np.float32)
        for level, share in enumerate(_TOPIC_SHARES)
    ]
    sides = np.empty((2, pairs, dimension), dtype=np.float32)
    for begin in range(0, pairs, _BLOCK):
        topics = topic_of[begin : begin + _BLOCK]
        shape = (len(topics), dimension)
        shared = np.float32(_PAIR_SHARE**0.5) * random.standard_normal(shape, dtype=np.float32)
        for level in levels:
            shared += level[topics // (leaves // len(level))]
        for side in range(2):
            own = np.float32(_SIDE_SHARE**0.5) * random.standard_normal(shape, dtype=np.float32)
            vectors = (shared + own + side * offset) * spectrum
            sides[side, begin : begin + _BLOCK] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return sides[1], sides[0]


def _flat(queries: Vectors, documents: Vectors, arguments: argparse.Namespace) -> NDArray[np.int32]:
    settings = KMeansSettings(iterations=arguments.iterations, tolerance=0, two_level_above=1 << 40)
    return cluster_pairs(ArrayPairs(queries=queries, documents=documents), arguments.clusters, settings, 0).assignments


def _two_levels(queries: Vectors, documents: Vectors, arguments: argparse.Namespace) -> NDArray[np.int32]:
    settings = KMeansSettings(iterations=arguments.iterations, tolerance=0, two_level_above=1)
    return cluster_pairs(ArrayPairs(queries=queries, documents=documents), arguments.clusters, settings, 0).assignments


def _faiss(queries: Vectors, documents: Vectors, arguments: argparse.Namespace) -> NDArray[np.int32]:
    faiss = import_faiss()
    faiss.omp_set_num_threads(arguments.threads)
    count, dimension = documents.shape
    points = np.empty((2 * count, 2 * dimension), dtype=np.float32)
    points[:count, :dimension] = points[count:, dimension:] = queries
    points[:count, dimension:] = points[count:, :dimension] = documents
    faiss.normalize_L2(points)
    kmeans = faiss.Kmeans(
        2 * dimension,
        arguments.clusters,
        niter=arguments.iterations,
        spherical=True,
        seed=42,
        max_points_per_centroid=2 * count,
    )
    kmeans.train(points)
    if len(kmeans.obj) != arguments.iterations:
        print(f"FAISS stopped after {len(kmeans.obj)} iterations", file=sys.stderr)
    assignments: NDArray[np.int32] = kmeans.index.search(points[:count], 1)[1][:, 0].astype(np.int32)
    return assignments


_SIDES: dict[str, Callable[[Vectors, Vectors, argparse.Namespace], NDArray[np.int32]]] = {
    "ours": _flat,
    "flat": _flat,
    "two levels": _two_levels,
    "FAISS": _faiss,
}


def _run_side(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    queries, documents = (np.load(f"{arguments.folder}/{name}.npy") for name in ("queries", "documents"))
    side = _SIDES[arguments.side]
    few = argparse.Namespace(**vars(arguments) | {"clusters": 2, "iterations": 1})
    side(queries[:500], documents[:500], few)  # libraries' code comes into memory, which is no part of the comparison
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident set so far
    started, cpu = time.perf_counter(), time.process_time()
    assignments = side(queries, documents, arguments)
    figures = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "mebibytes": _resident("VmHWM") - before,
    }
    np.save(f"{arguments.folder}/{arguments.side}.npy", assignments)
    print(json.dumps(figures))


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def _measure(side: str, arguments: argparse.Namespace, iterations: int = 0) -> Figures:
    """One run of a side in a process of its own."""
    values = vars(arguments) | {"side": side, "iterations": iterations or arguments.iterations}
    options = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in values.items()
        if name not in ("against", "half") and value is not None
    ]
    command = [sys.executable, "-m", "benchmarks.kmeans", arguments.against, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    print(
        f"  {side}, {values['iterations']} iterations: {figures['seconds']:.1f} s, {figures['cpu_seconds']:.1f} s of"
        f" processor time, {figures['mebibytes']:.0f} MiB beyond the vectors",
        flush=True,
    )
    return figures


def _fastest(sides: list[str], arguments: argparse.Namespace) -> dict[str, Figures]:
    """The least of each figure over the rounds, in which the sides take turns."""
    measured = [{side: _measure(side, arguments) for side in sides} for _ in range(arguments.rounds)]
    return {side: {name: min(found[side][name] for found in measured) for name in measured[0][side]} for side in sides}


def _against_faiss(arguments: argparse.Namespace, queries: Vectors, documents: Vectors) -> None:
    best = _fastest(["ours", "FAISS"], arguments)
    ours, faiss = best["ours"], best["FAISS"]
    print(
        f"{arguments.pairs:,} pairs x {arguments.dimension}, K = {arguments.clusters:,},"
        f" {arguments.iterations} iterations, {arguments.threads} threads: FAISS / ours:"
        f" {faiss['seconds'] / ours['seconds']:.1f} in time,"
        f" {faiss['cpu_seconds'] / ours['cpu_seconds']:.1f} in processor time,"
        f" {faiss['mebibytes'] / ours['mebibytes']:.1f} in memory"
    )
    for side, sweeps in (("FAISS", 0), ("ours", 0), ("ours", arguments.polish_sweeps)):
        hardness, used = _packed_hardness(
            np.load(f"{arguments.folder}/{side}.npy"), queries, documents, sweeps, arguments
        )
        print(
            f"  {side}, packed{' and polished' if sweeps else ''}: Eq. 2 {hardness:.4f} a batch, {used} clusters used"
        )


def _packed_hardness(
    assignments: NDArray[np.int32], queries: Vectors, documents: Vectors, sweeps: int, arguments: argparse.Namespace
) -> tuple[float, int]:
    """Mean q_i·d_j over i != j of a batch, over all batches along the tour of the clusters' mean mid-points."""
    used, clusters = np.unique(assignments, return_inverse=True)
    clusters = clusters.astype(np.int32)
    centroids = np.zeros((len(used), documents.shape[1]))
    np.add.at(centroids, clusters, (documents + queries) / 2)
    centroids /= np.bincount(clusters)[:, None]
    packing = pack(
        clusters,
        centroids.astype(np.float32),
        PackingSettings(batch_size=arguments.batch_size, polish_sweeps=sweeps),
        seed=0,
        epoch=0,
        vectors=(lambda items: (queries[items], documents[items])) if sweeps else None,
    )
    values = [batch_hardness(queries=queries[batch], documents=documents[batch]) for batch in packing.batches]
    return float(np.mean(values)), len(used)


def _against_flat(arguments: argparse.Namespace, queries: Vectors, documents: Vectors) -> None:
    two = _measure("two levels", arguments)
    if arguments.flat_iterations:
        shorter, longer = (_measure("flat", arguments, arguments.flat_iterations - less) for less in (1, 0))
        more = arguments.iterations - arguments.flat_iterations
        flat = {name: longer[name] + more * (longer[name] - shorter[name]) for name in ("seconds", "cpu_seconds")}
        how = f"extrapolated from {arguments.flat_iterations}"
    else:
        flat, how = _measure("flat", arguments), "measured"
    print(
        f"{arguments.pairs:,} pairs x {arguments.dimension}, K = {arguments.clusters:,}, {arguments.iterations}"
        f" iterations, {arguments.threads} threads: flat ({how}) / two levels:"
        f" {flat['seconds'] / two['seconds']:.1f} in time ({flat['seconds']:.0f} s / {two['seconds']:.0f} s),"
        f" {flat['cpu_seconds'] / two['cpu_seconds']:.1f} in processor time"
    )
    sides = ["two levels"] if arguments.flat_iterations else ["two levels", "flat"]
    found = {side: _similarity(np.load(f"{arguments.folder}/{side}.npy"), queries, documents) for side in sides}
    for side, (cosine, within) in found.items():
        print(
            f"  {side}: mean cosine of mid-point and centroid {cosine:.4f}, mean q_i·d_j within clusters {within:.4f}"
        )
    if not arguments.flat_iterations:
        shares = [mine / other for mine, other in zip(found["two levels"], found["flat"], strict=True)]
        print(f"  two levels / flat: {shares[0]:.1%} of the first, {shares[1]:.1%} of the second")


def _similarity(assignments: NDArray[np.int32], queries: Vectors, documents: Vectors) -> tuple[float, float]:
    """The mean cosine of each mid-point with its cluster's mean; the mean q_i·d_j over i != j of one cluster."""
    counts = np.bincount(assignments).astype(float)
    centroids = np.zeros((len(counts), documents.shape[1]))
    cosines, own = 0.0, 0.0
    for begin in range(0, len(documents), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        np.add.at(centroids, assignments[part], documents[part] + queries[part])
        own += float(np.einsum("ij,ij->", documents[part], queries[part], dtype=np.float64))
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-30)
    for begin in range(0, len(documents), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        points = documents[part] + queries[part]
        products = np.einsum("ij,ij->i", points, centroids[assignments[part]])
        cosines += float((products / np.linalg.norm(points, axis=1)).sum())
    both_ways = float(pair_similarity(queries=queries, documents=documents, groups=assignments).sum()) / 2
    return cosines / len(documents), (both_ways - own) / float((counts * (counts - 1)).sum())


def pair_similarity(
    *, queries: NDArray[np.floating], documents: NDArray[np.floating], groups: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Eq. 2 of each group, float64 (groups,): the sum over i, j in it, i = j included, of d_i·q_j + d_j·q_i.

    ``queries``, ``documents`` (N, d), may be memory-mapped; ``groups`` (N,): the group of each pair, from 0. Computed
    as 2·S_D·S_Q with S the sums of a group's vectors: linear in N.
    """
    count = int(groups.max()) + 1
    document_sums = np.zeros((count, documents.shape[1]))
    query_sums = np.zeros_like(document_sums)
    for begin in range(0, len(groups), BLOCK_ROWS):
        part = slice(begin, begin + BLOCK_ROWS)
        document_sums += cluster_sums(documents[part], groups[part], count)
        query_sums += cluster_sums(queries[part], groups[part], count)
    sums: NDArray[np.float64] = 2 * np.einsum("ij,ij->i", document_sums, query_sums)
    return sums


if __name__ == "__main__":
    main()
