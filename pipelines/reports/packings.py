"""How hard a packing's batches are beside other ways to batch the same pairs (Morris & Rush 2024, eq. 2)."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.pipelines.clusters import DomainClusters
from raytriever.pipelines.packing.hardness import batch_hardness
from raytriever.pipelines.packing.pack import PackingSettings, pack
from raytriever.pipelines.pairs import read_pairs
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.plots import BLUE, GREY, ORANGE, Distribution, ridgelines
from raytriever.retrieval.provenance_report import folder_name
from raytriever.retrieval.report import Block, Plot, Table
from raytriever.retrieval.vectors import StoredVectors

EPOCH = 0
RANDOM = "random"
RANDOM_IN_DOMAIN = "random within each domain"
RANDOM_CLUSTERS = "clusters in random order"
UNPOLISHED = "tour of clusters, no swaps"
MASKED = "as packed, masked out"
TOURED_UP_TO = 1 << 14  # clusters of all domains; of more the tour isn't taken again for the report

Batches = NDArray[np.int64]


class PairVectors:
    """The vectors of every pair's query and document; ``pairs`` and ``vectors`` are of one collection."""

    def __init__(self, pairs: Artifact, vectors: StoredVectors) -> None:
        rows = read_pairs(pairs, ["query_row", "document_row"])
        self._query_rows, self._document_rows = rows["query_row"].to_numpy(), rows["document_row"].to_numpy()
        self._queries, self._documents = vectors.part("queries"), vectors.part("documents")

    def hardness(self, batch: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> float:
        """``batch_hardness`` of these pair numbers (B,), without the cells of ``mask`` (B, B)."""
        queries = self._queries.gather(self._query_rows[batch])
        return batch_hardness(queries, self._documents.gather(self._document_rows[batch]), mask)


def packed_pairs(packing: Artifact) -> Batches:
    """Pair numbers of every batch of epoch 0, (batches, B)."""
    pairs = pq.read_table(packing.path(_file()), columns=["pair"])["pair"].to_numpy()
    return np.asarray(pairs, dtype=np.int64).reshape(-1, int(packing.shards[EPOCH].facts["batch_size"]))


def _file() -> str:
    return f"epoch={EPOCH:05d}/packing.parquet"


def other_packings(
    packed: Batches, domains: Sequence[DomainClusters] | None, packing: Artifact, seed: int
) -> dict[str, Batches]:
    """Batches of the same size, as many, of the very same pairs: random ones; with clusters, more kinds.

    What a packing leaves out depends on its seed and epoch alone, so these leave out the same.
    """
    generator = np.random.default_rng([seed, 0])
    found = {RANDOM: generator.permutation(packed.ravel()).reshape(packed.shape)}
    settings = PackingSettings.model_validate(packing.config["packing"])
    is_clustered = "clusters" in packing.manifest["inputs"]
    if is_clustered and not settings.mix_domains:
        labels = _domain_labels(packing)
        if labels.any():  # more than one
            found[RANDOM_IN_DOMAIN] = _shuffle_within(packed, labels, generator)
    if domains is None or not is_clustered:
        return found
    plain = settings.model_copy(update={"order": "random", "polish_sweeps": 0})
    packing_seed = int(packing.config["seed"])
    if settings != plain:
        found[RANDOM_CLUSTERS] = _pack(domains, plain, packing_seed)
    toured = settings.order == "tour" and settings.polish_sweeps > 0
    if toured and sum(len(domain.centroids) for domain in domains) <= TOURED_UP_TO:
        found[UNPOLISHED] = _pack(domains, settings.model_copy(update={"polish_sweeps": 0}), packing_seed)
    return found


def _domain_labels(packing: Artifact) -> NDArray[np.integer]:
    """The number of each packed pair's domain; their names are never held once for each pair."""
    table = pq.read_table(packing.path(_file()), columns=["domain"], read_dictionary=["domain"])
    chunks = table.unify_dictionaries()["domain"].chunks
    return np.concatenate([chunk.indices.to_numpy() for chunk in chunks])


def _shuffle_within(packed: Batches, labels: NDArray[np.integer], generator: np.random.Generator) -> Batches:
    """The packed pairs, each at the place of another of its domain; ``labels`` (pairs,): the domain at each place."""
    shuffled = generator.permutation(packed.size)
    shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
    result = np.empty(packed.size, dtype=np.int64)
    result[np.argsort(labels, kind="stable")] = packed.ravel()[shuffled]
    return result.reshape(packed.shape)


def _pack(domains: Sequence[DomainClusters], settings: PackingSettings, seed: int) -> Batches:
    pairs = np.concatenate([domain.pairs for domain in domains])
    assignments = np.concatenate([domain.clusters for domain in domains])
    labels = np.repeat(np.arange(len(domains)), [len(domain.pairs) for domain in domains])
    centroids = [np.asarray(domain.centroids) for domain in domains]
    return np.asarray(pairs[pack(assignments, labels, centroids, settings, seed, EPOCH).batches], dtype=np.int64)


def packed_name(packing: Artifact) -> str:
    """How the packing was made, in words."""
    settings = PackingSettings.model_validate(packing.config["packing"])
    if settings.mix_domains:
        order = "random across domains"
    elif "clusters" not in packing.manifest["inputs"]:
        order = RANDOM_IN_DOMAIN
    else:
        order = {"tour": "tour of clusters", "topics": "one topic a batch"}.get(settings.order, RANDOM_CLUSTERS)
    polish = ", swaps" if settings.polish_sweeps else ""
    return f"as packed: {order}{polish}"


def packing_sentence(packing: Artifact) -> str:
    """How many batches of which size, and what an epoch leaves out."""
    first = packing.shards[EPOCH]
    left_out = sum(first.dropped.values())
    sentence = (
        f"An epoch has {first.counts['batches']:,} batches of {first.facts['batch_size']} pairs"
        f" (epochs: {len(packing.shards)})"
    )
    if left_out:
        share = left_out / (left_out + first.rows)
        sentence += f"; {left_out:,} pairs ({share:.1%}) fill no batch of their domain in epoch {EPOCH}"
    return sentence + "."


def hardness_of_packings(
    packing: Artifact,
    of_pairs: PairVectors,
    domains: Sequence[DomainClusters] | None,
    chosen: NDArray[np.int64],
    seed: int,
) -> dict[str, NDArray[np.float64]]:
    """Hardness of the ``chosen`` batches (n,) of the packing and of as many of each other way to batch its pairs."""
    packed = packed_pairs(packing)
    found = other_packings(packed, domains, packing, seed) | {packed_name(packing): packed}
    return {name: np.array([of_pairs.hardness(batch) for batch in batches[chosen]]) for name, batches in found.items()}


def hardness_sentence(measured: Mapping[str, NDArray[np.float64]], packed: str) -> str:
    """What the numbers say of the packed batches beside random ones."""
    ours, random = measured[packed], measured[RANDOM]
    above = int((ours > random.max()).sum())
    sentence = (
        "A batch's hardness is the mean similarity between its queries and the documents of its other pairs"
        f" (Morris & Rush 2024, eq. 2). As packed it is {ours.mean():.3f} on average, in random batches of the same"
        f" pairs {random.mean():.3f}; {above:,} of {len(ours):,} packed batches are harder than the hardest random one."
    )
    others = {name: values.mean() for name, values in measured.items() if name not in (packed, RANDOM, MASKED)}
    if others:
        hardest = max(others, key=lambda name: others[name])
        sentence += f" The hardest other way tried, '{hardest}', gives {others[hardest]:.3f}."
    if MASKED in measured and len(measured[MASKED]):
        sentence += f" Without the masked documents it averages {measured[MASKED].mean():.3f}."
    return sentence


def hardness_blocks(
    measured: Mapping[str, NDArray[np.float64]], vectors: StoredVectors, packing: Artifact
) -> list[Block]:
    """The distributions, drawn and in figures."""
    colors = {packed_name(packing): BLUE, MASKED: ORANGE}
    distributions = [Distribution(name, values, colors.get(name, GREY)) for name, values in measured.items()]
    svg = ridgelines(distributions, "hardness of a batch (mean q·d of its other pairs)", "Hardness of batches")
    number = len(distributions[0].values)
    caption = (
        f"Hardness of {number:,} batches of epoch {EPOCH} by the vectors of {folder_name(vectors)};"
        " each histogram is scaled to its own highest bar. Every row has batches of the same size of the same pairs."
    )
    if MASKED in measured and len(measured[MASKED]) < number:
        caption += f" The last row is without {number - len(measured[MASKED]):,} in which every document is masked."
    rows = [
        [
            name,
            f"{len(v):,}",
            f"{v.mean():.4f}",
            f"{v.std(ddof=1) if len(v) > 1 else 0:.4f}",
            f"{v.min():.4f}",
            f"{v.max():.4f}",
        ]
        for name, v in measured.items()
    ]
    header = ["batches", "number", "mean", "standard deviation", "easiest", "hardest"]
    return [Plot(svg, caption), Table(header, rows)]
