"""The best 100 documents of every training query: blocks of queries against one query at a time, in one process.

    python -m benchmarks.mining --documents 200000 --queries 1024

One at a time, a query is scored by a matrix-vector product, or as CODER's published code does by multiplying every
document with it and summing, and its scores are sorted. Rounds are interleaved; prints times a query and their ratios.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.indexes.exact_search import search_stored

Vectors = NDArray[np.float32]


def by_product(query: torch.Tensor, documents: torch.Tensor, k: int) -> torch.Tensor:
    """A matrix-vector product, then a full sort."""
    return torch.argsort(documents @ query, descending=True, stable=True)[:k]


def by_sum(query: torch.Tensor, documents: torch.Tensor, k: int) -> torch.Tensor:
    """Every document times the query, summed, then a full sort."""
    return torch.argsort((documents * query).sum(dim=1), descending=True, stable=True)[:k]


def seconds_each(
    search: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    queries: Vectors,
    documents: Vectors,
    k: int,
    expected: NDArray[np.int64],
) -> tuple[float, float]:
    """Seconds a query one at a time, and the share of the results that the blocks found too."""
    store = torch.from_numpy(documents)
    started = time.perf_counter()
    found = [search(torch.from_numpy(query), store, k).numpy() for query in queries]
    seconds = (time.perf_counter() - started) / len(queries)
    same = np.mean([len(np.intersect1d(one, other)) / k for one, other in zip(found, expected, strict=True)])
    return seconds, float(same)


def main() -> None:
    """Three rounds; the median counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--sample", type=int, default=8, help="queries of a round that are searched one at a time")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    documents, queries = (
        generator.normal(size=(number, arguments.dimension)).astype(np.float32)
        for number in (arguments.documents, arguments.queries)
    )
    times: dict[str, list[float]] = {"blocks": [], "product": [], "sum": []}
    for number in range(3):
        started = time.perf_counter()
        ranking = search_stored(queries, documents, arguments.k)
        times["blocks"].append((time.perf_counter() - started) / len(queries))
        sample = slice(number * arguments.sample, (number + 1) * arguments.sample)
        for name, search in (("product", by_product), ("sum", by_sum)):
            seconds, same = seconds_each(search, queries[sample], documents, arguments.k, ranking.rows[sample])
            times[name].append(seconds)
            print(f"round {number + 1}, one at a time by {name}: {same:.2%} of the results are the blocks'")
    each = {name: float(np.median(values)) for name, values in times.items()}
    print(f"{arguments.queries} queries, {arguments.documents} documents, {arguments.dimension} dimensions,", end=" ")
    print(f"top {arguments.k}, {torch.get_num_threads()} threads")
    for name in ("product", "sum"):
        ratios = ", ".join(f"{one / block:.0f}" for one, block in zip(times[name], times["blocks"], strict=True))
        print(
            f"by {name} {each[name] * 1e3:.1f} ms a query, in blocks {each['blocks'] * 1e3:.3f} ms:"
            f" {each[name] / each['blocks']:.0f} times (rounds {ratios})"
        )


if __name__ == "__main__":
    main()
