"""Exact search over shards, a worker with one thread each as the job has it, against one FAISS Flat index over all
vectors with as many threads.

    python -m benchmarks.search --documents 100000 --queries 1000 --k 100

Prints the ratio of queries a second (rounds alternate between the two) and whether both rankings are the same.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import faiss
import numpy as np

from retrieval.indexes.top_k import Ranking, merge_rankings
from retrieval.indexes.vector_index import build_shard, search_shard, set_threads, train


def main() -> None:
    """Measures both on random unit vectors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((arguments.documents, arguments.dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = generator.standard_normal((arguments.queries, arguments.dimension), dtype=np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    whole = faiss.IndexFlatIP(arguments.dimension)
    whole.add(vectors)
    bounds = np.linspace(0, arguments.documents, arguments.threads + 1, dtype=int)
    empty = train(vectors[:1], "Flat", seed=0)
    shards = [
        (first, build_shard([vectors[first:last]], "Flat", trained=empty)) for first, last in pairwise(bounds.tolist())
    ]
    workers = ThreadPoolExecutor(arguments.threads, initializer=set_threads, initargs=(1,))

    def search_shards() -> Ranking:
        found = workers.map(lambda shard: search_shard(shard[1], queries, arguments.k, shard[0]), shards)
        return merge_rankings(list(found), arguments.k)

    search_shards()
    faiss.omp_set_num_threads(arguments.threads)  # of this thread; a worker's calls keep to one
    seconds: list[tuple[float, float]] = []
    for _ in range(arguments.rounds + 1):
        started = time.perf_counter()
        _, rows = whole.search(queries, arguments.k)
        between = time.perf_counter()
        found = search_shards()
        seconds.append((between - started, time.perf_counter() - between))
    ratios = sorted(flat / ours for flat, ours in seconds[1:])  # the first round warms up
    flat, ours = (min(column) for column in zip(*seconds[1:], strict=True))
    same = float(np.mean(found.rows == rows))
    print(
        f"{arguments.queries:,} queries, {arguments.documents:,} x {arguments.dimension}, k {arguments.k}: FAISS Flat"
        f" {flat:.3f} s, {len(shards)} shards merged {ours:.3f} s"
    )
    print(
        f"queries a second, ratio: median {ratios[len(ratios) // 2]:.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" equal places {same:.4%}"
    )


if __name__ == "__main__":
    main()
