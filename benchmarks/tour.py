"""The greedy tour through neighbour lists, against one matrix-vector product a step, in one process.

    python -m benchmarks.tour --clusters 16384 --dimension 384

Prints the ratio of times and whether both walks are the same.
"""

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.tour import find_neighbours, greedy_tour


def greedy_by_products(centroids: NDArray[np.float32], start: int) -> NDArray[np.int64]:
    """The literal greedy walk: every step compares with all clusters."""
    half_norms = 0.5 * np.einsum("kd,kd->k", centroids, centroids)
    visited = np.zeros(len(centroids), dtype=bool)
    order = [start]
    for _ in range(len(centroids) - 1):
        visited[order[-1]] = True
        nearness = centroids @ centroids[order[-1]] - half_norms
        nearness[visited] = -np.inf
        order.append(int(nearness.argmax()))
    return np.array(order)


def main() -> None:
    """Measures both on clustered random centroids."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=16_384)
    parser.add_argument("--dimension", type=int, default=384)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(arguments.clusters // 64, arguments.dimension))
    noise = 0.5 * generator.normal(size=(arguments.clusters, arguments.dimension))
    centroids = (centres[generator.integers(len(centres), size=arguments.clusters)] + noise).astype(np.float32)

    started = time.perf_counter()
    literal = greedy_by_products(centroids, 0)
    literal_seconds = time.perf_counter() - started
    started = time.perf_counter()
    order = greedy_tour(find_neighbours(centroids), 0)
    seconds = time.perf_counter() - started
    same = bool((order == literal).all())
    print(f"{arguments.clusters} clusters: products {literal_seconds:.2f} s, neighbour lists {seconds:.2f} s,")
    print(f"ratio {literal_seconds / seconds:.1f}, the same tour: {same}")


if __name__ == "__main__":
    main()
