"""The greedy tour through neighbour lists, against one matrix-vector product a step, in one process.

    python -m benchmarks.tour --clusters 16384 --dimension 384
    python -m benchmarks.tour --clusters 262144 --dimension 128 --rounds 0

Prints the ratio of times in rounds of both, and whether both walks are the same; with ``--rounds 0`` the tour alone
with its peak of memory. The products of the literal walk use as many threads as NumPy's BLAS takes. ``--regions``: how
much longer a tour in so many regions is, one after another.
"""

import argparse
import resource
import time

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.clustering.lloyd import divide
from pipelines.packing.neighbours import find_neighbours
from pipelines.packing.tour import greedy_tour

CLUSTERS_OF_A_BLOB = 64


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


def blobs(clusters: int, dimension: int) -> NDArray[np.float32]:
    """Centroids in random blobs."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(max(1, clusters // CLUSTERS_OF_A_BLOB), dimension))
    found = np.empty((clusters, dimension), dtype=np.float32)
    for begin in range(0, clusters, 16_384):
        part = found[begin : begin + 16_384]
        part[:] = centres[generator.integers(len(centres), size=len(part))]
        part += 0.5 * generator.normal(size=part.shape)
    return found


def by_lists(centroids: NDArray[np.float32]) -> tuple[NDArray[np.int64], float, float]:
    """The tour, the seconds of its lists and those of its walk."""
    started = time.perf_counter()
    neighbours = find_neighbours(centroids)
    listed = time.perf_counter()
    tour = greedy_tour(neighbours, 0)
    return tour, listed - started, time.perf_counter() - listed


def in_regions(centroids: NDArray[np.float32], regions: int) -> NDArray[np.int64]:
    """The tours of regions one after another, each from a cluster drawn at random."""
    region_of, generator = divide(centroids, np.ones(len(centroids), dtype=int), regions), np.random.default_rng(0)
    tours = []
    for region in range(regions):
        clusters = np.flatnonzero(region_of == region)
        walk = greedy_tour(find_neighbours(centroids[clusters]), int(generator.integers(len(clusters))))
        tours.append(clusters[walk])
    return np.concatenate(tours)


def tour_length(centroids: NDArray[np.floating], order: NDArray[np.integer]) -> float:
    """Sum of the Euclidean distances between consecutive clusters of ``order``; the tour isn't closed."""
    total = 0.0
    for begin in range(0, len(order), 4096):
        stops = centroids[order[begin : begin + 4097]].astype(np.float64)
        total += float(np.sqrt(np.square(np.diff(stops, axis=0)).sum(axis=1)).sum())
    return total


def main() -> None:
    """Measures both on clustered random centroids."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=16_384)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--regions", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    centroids = blobs(arguments.clusters, arguments.dimension)
    by_lists(centroids[:1024])  # the first products start threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ratios = []
    tour, listing, walking = by_lists(centroids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for _ in range(arguments.rounds):
        tour, listing, walking = by_lists(centroids)
        started = time.perf_counter()
        literal = greedy_by_products(centroids, 0)
        seconds = time.perf_counter() - started
        ratios.append(seconds / (listing + walking))
        same = bool((tour == literal).all())
        print(f"products {seconds:.2f} s, lists {listing:.2f} s + walk {walking:.2f} s, the same tour: {same}")
    size = arguments.clusters
    print(
        f"{size:,} clusters of dimension {arguments.dimension}, {torch.get_num_threads()} threads: lists"
        f" {listing:.2f} s, walk {walking:.2f} s; peak memory {peak:.2f} GiB ({before:.2f} before)"
    )
    random = tour_length(centroids, np.random.default_rng(0).permutation(size))
    print(f"length {tour_length(centroids, tour):,.0f}, of a random order {random:,.0f}")
    for regions in arguments.regions:
        order = in_regions(centroids, regions)
        longer = tour_length(centroids, order) / tour_length(centroids, tour) - 1
        print(f"in {regions} regions {longer:+.2%}")
    if ratios:
        print(f"ratio {np.median(ratios):.1f} (median of {len(ratios)} rounds)")


if __name__ == "__main__":
    main()
