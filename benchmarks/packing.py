"""How hard batches of real pairs are: random, clustered, packed, polished, and by the authors' recipe.

    python -m benchmarks.packing ../shared/data/medquad_liveqa ../shared/data/squad_dpr --vectors /tmp/vectors

Takes BEIR folders; embeds the judged queries and documents of a split with MiniLM and keeps the vectors in a folder.
A batch's hardness is the mean q_i·d_j over i != j (Eq. 2 of Contextual Document Embeddings), before and after the
mask of false negatives, s_ij >= s_ii by the same vectors; the mean over all batches is printed. The authors' recipe:
k-means on both copies of the concatenated pairs, a greedy tour over the mean document vectors of the clusters, items of
a cluster in the order of the data, cut at every batch, the tail dropped. Each folder is treated as one domain.
"""

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs, number_of_clusters
from pipelines.clustering.lloyd import divide
from pipelines.clustering.pair_vectors import ArrayPairs
from pipelines.filtering.false_negatives import batch_hardness, score_mask
from pipelines.packing.neighbours import find_neighbours
from pipelines.packing.pack import PackingSettings, cut_into_batches, items_in_order, pack
from pipelines.packing.tour import greedy_tour
from retrieval.collections.collection import passage_text
from retrieval.embedding import encode_texts
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
AUTHORS = "authors' recipe"
POLISHED = "packed and polished"

Vectors = NDArray[np.float32]
Batches = NDArray[np.int64]


def main() -> None:
    """Measures each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--split", default="train")
    parser.add_argument("--vectors", type=Path, required=True, help="Folder that keeps the vectors.")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64])
    parser.add_argument("--cluster-size", type=int, help="the batch size by default")
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--regions", type=int, nargs="*", default=[], help="in which a domain is packed, besides whole")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        queries, documents = vectors_of(folder, arguments.split, arguments.vectors)
        for size in arguments.batch_size:
            cluster_size = arguments.cluster_size or size
            print(f"{folder.name}, {len(queries):,} pairs, batches of {size}, clusters of {cluster_size}")
            measure(queries, documents, size, cluster_size, arguments.sweeps, arguments.regions)


def vectors_of(folder: Path, split: str, kept: Path) -> tuple[Vectors, Vectors]:
    """Query and document vectors of the split's pairs, float32 (pairs, dimension), in the order of the judgments."""
    with (folder / "qrels" / f"{split}.tsv").open(encoding="utf-8") as file:
        rows = [row[:2] for row in list(csv.reader(file, delimiter="\t"))[1:] if int(row[2]) > 0]
    sides = []
    for side, (name, place) in {"query": ("queries", 0), "document": ("corpus", 1)}.items():
        ids = sorted({row[place] for row in rows})
        path = kept / f"{folder.name}-{split}-{name}.npy"
        if not path.exists():
            kept.mkdir(parents=True, exist_ok=True)
            np.save(path, _embed(folder / f"{name}.jsonl", ids, side))
        number_of = {identifier: number for number, identifier in enumerate(ids)}
        sides.append(np.load(path).astype(np.float32)[[number_of[row[place]] for row in rows]])
    return sides[0], sides[1]


def _embed(path: Path, ids: list[str], side: str) -> NDArray[np.float16]:
    with path.open(encoding="utf-8") as file:
        records = {record["_id"]: record for record in map(json.loads, file)}
    texts = [passage_text(records[i].get("title", ""), records[i]["text"]) for i in ids]
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint).eval()
    return encode_texts(encoder, texts, "query" if side == "query" else "document").astype(np.float16)


def measure(
    queries: Vectors, documents: Vectors, size: int, cluster_size: int, sweeps: int, regions: list[int]
) -> None:
    """Prints the table of one folder and batch size."""
    started = time.perf_counter()
    batches = {AUTHORS: authors_batches(queries, documents, size, cluster_size)}
    seconds = {AUTHORS: time.perf_counter() - started}

    def vectors(items: NDArray[np.int64]) -> tuple[Vectors, Vectors]:
        return queries[items], documents[items]

    started = time.perf_counter()
    k = number_of_clusters(len(queries), cluster_size)
    pairs = ArrayPairs(queries=queries, documents=documents)
    clustering = cluster_pairs(pairs, k, KMeansSettings(), seed=0)
    clusters = clustering.assignments.astype(np.int32)
    clustered = time.perf_counter() - started
    for name, assignments, centroids, settings in (
        ("random", np.zeros_like(clusters), clustering.centroids[:1], PackingSettings(batch_size=size, order="random")),
        ("clusters, random order", clusters, clustering.centroids, PackingSettings(batch_size=size, order="random")),
        ("packed along the tour", clusters, clustering.centroids, PackingSettings(batch_size=size)),
        (POLISHED, clusters, clustering.centroids, PackingSettings(batch_size=size, polish_sweeps=sweeps)),
    ):
        started = time.perf_counter()
        found = pack(assignments, centroids, settings, 0, 0, vectors=vectors)
        batches[name] = found.batches
        seconds[name] = time.perf_counter() - started + (clustered if name != "random" else 0)
    for number in regions:
        started = time.perf_counter()
        name = f"polished in {number} regions"
        batches[name] = in_regions(queries, documents, clusters, clustering.centroids, number, settings)
        seconds[name] = time.perf_counter() - started + clustered
    figures = {name: hardness(of_way, queries, documents) for name, of_way in batches.items()}
    print(f"  {'':26}{'before':>9}{'after':>9}{'masked':>9}{'seconds':>9}")
    for name, (before, after, masked) in figures.items():
        print(f"  {name:26}{before:9.4f}{after:9.4f}{masked:9.2%}{seconds[name]:9.2f}")
    ratios = [figures[POLISHED][column] / figures[AUTHORS][column] - 1 for column in (0, 1)]
    print(f"  polished against the {AUTHORS}: {ratios[0]:+.1%} before the mask, {ratios[1]:+.1%} after")


def in_regions(
    queries: Vectors, documents: Vectors, clusters: NDArray[np.int32], centroids: Vectors, regions: int,
    settings: PackingSettings,
) -> Batches:  # fmt: skip
    """As a domain is packed that is too large for one task."""
    region_of = divide(centroids, np.bincount(clusters), regions)
    found = []
    for region in range(regions):
        items = np.flatnonzero(region_of[clusters] == region)
        own, numbers = np.unique(clusters[items], return_inverse=True)

        def vectors(chosen: NDArray[np.int64], items: NDArray[np.int64] = items) -> tuple[Vectors, Vectors]:
            return queries[items[chosen]], documents[items[chosen]]

        packed = pack(numbers.astype(np.int32), centroids[own], settings, 0, 0, vectors=vectors, region=region)
        found.append(items[packed.batches])
    return np.concatenate(found)


def authors_batches(queries: Vectors, documents: Vectors, size: int, cluster_size: int) -> Batches:
    """As the authors' code cuts them (for one domain)."""
    k = number_of_clusters(len(queries), cluster_size)
    pairs = ArrayPairs(queries=queries, documents=documents)
    clusters = cluster_pairs(pairs, k, KMeansSettings(pairs="concat"), seed=0).assignments.astype(np.int32)
    counts = np.bincount(clusters)
    means = np.zeros((len(counts), documents.shape[1]))
    np.add.at(means, clusters, documents.astype(np.float64))
    centroids = (means / counts[:, None]).astype(np.float32)
    order = greedy_tour(find_neighbours(centroids), int(np.random.default_rng(0).integers(len(counts))))
    batches, _ = cut_into_batches(items_in_order(np.arange(len(queries)), clusters, order, generator=None), size)
    return batches  # the rest is left out there


def hardness(batches: Batches, queries: Vectors, documents: Vectors) -> tuple[float, float, float]:
    """Mean hardness before and after masking, and the share masked."""
    before, after, masked = [], [], []
    own = np.eye(batches.shape[1], dtype=bool)
    for batch in batches:
        mask = score_mask(queries=queries[batch], documents=documents[batch], own=own)
        before.append(batch_hardness(queries=queries[batch], documents=documents[batch]))
        after.append(batch_hardness(queries=queries[batch], documents=documents[batch], mask=mask))
        masked.append(mask.sum() / (mask.size - len(mask)))
    return float(np.mean(before)), float(np.mean(after)), float(np.mean(masked))


if __name__ == "__main__":
    main()
