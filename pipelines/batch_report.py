"""The report's section on batches: how hard they are beside other ways to batch the same pairs, and what is masked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.pipelines.batches import BatchReader
from raytriever.pipelines.clusters import DomainClusters, read_clusters
from raytriever.pipelines.false_negatives import from_columns
from raytriever.pipelines.hardness import batch_hardness
from raytriever.pipelines.packing import PackingSettings, pack
from raytriever.pipelines.pairs import read_pairs
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.plots import BLUE, GREY, ORANGE, Distribution, histogram, ridgelines
from raytriever.retrieval.provenance_report import folder_name
from raytriever.retrieval.report import Block, Plot, Section, Table
from raytriever.retrieval.vectors import StoredVectors

_EPOCH = 0
_MASKED_BY = "masked by "
RANDOM = "random"
RANDOM_IN_DOMAIN = "random within each domain"
RANDOM_CLUSTERS = "clusters in random order"
MASKED = "as packed, masked out"

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


def read_masks(reader: BatchReader, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], float]]:
    """Of these batches of epoch 0: the mask (B, B) over its own documents, the share of all its negatives masked."""
    for number in numbers:
        batch = reader.read(_EPOCH, int(number))
        size = len(batch)
        hard_negatives = sum(map(len, batch["hard_negative_ids"].to_pylist()))
        mask = from_columns(batch["masked"].to_pylist(), size + hard_negatives)
        yield mask[:, :size], float(mask.sum()) / max(size * (size - 1 + hard_negatives), 1)


def packed_pairs(packing: Artifact) -> Batches:
    """Pair numbers of every batch of epoch 0, (batches, B)."""
    name = f"epoch={_EPOCH:05d}/packing.parquet"
    pairs = pq.read_table(packing.path(name), columns=["pair"])["pair"].to_numpy()
    return np.asarray(pairs, dtype=np.int64).reshape(-1, int(packing.shards[0].facts["batch_size"]))


def other_packings(
    packed: Batches, domains: Sequence[DomainClusters] | None, packing: Artifact, seed: int
) -> dict[str, Batches]:
    """Batches of the same size, as many, of the very same pairs: random ones; with clusters, two more kinds.

    What a packing leaves out depends on its seed and epoch alone, so these leave out the same.
    """
    shuffled = np.random.default_rng([seed, 0]).permutation(packed.ravel())
    found = {RANDOM: shuffled.reshape(packed.shape)}
    if domains is None:
        return found
    settings = PackingSettings.model_validate(packing.config["packing"])
    plain = settings.model_copy(update={"order": "random", "polish_sweeps": 0})
    packing_seed = int(packing.config["seed"])
    if len(domains) > 1:
        one_cluster = [replace(d, clusters=np.zeros_like(d.clusters), centroids=d.centroids[:1]) for d in domains]
        found[RANDOM_IN_DOMAIN] = _pack(one_cluster, plain, packing_seed)
    if settings != plain:
        found[RANDOM_CLUSTERS] = _pack(domains, plain, packing_seed)
    return found


def _pack(domains: Sequence[DomainClusters], settings: PackingSettings, seed: int) -> Batches:
    pairs = np.concatenate([domain.pairs for domain in domains])
    assignments = np.concatenate([domain.clusters for domain in domains])
    labels = np.repeat(np.arange(len(domains)), [len(domain.pairs) for domain in domains])
    centroids = [np.asarray(domain.centroids) for domain in domains]
    return np.asarray(pairs[pack(assignments, labels, centroids, settings, seed, _EPOCH).batches], dtype=np.int64)


def sample_of(total: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``total`` numbers, ascending: all where they are no more."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, 1]).choice(total, most, replace=False))


def batches_section(
    packing: Artifact | None,
    pairs: Artifact | None,
    vectors: StoredVectors | None,
    clusters: Artifact | None,
    batches: BatchReader | None,
    most: int,
    seed: int,
) -> Section | None:
    """Hardness (needs packing, pairs and vectors), masks (need batches); None where it could show neither.

    At most ``most`` batches of epoch 0 are read, a sample by ``seed`` where there are more.
    """
    lead: list[str] = []
    blocks: list[Block] = []
    hardness: dict[str, NDArray[np.float64]] = {}
    of_pairs = PairVectors(pairs, vectors) if pairs is not None and vectors is not None else None
    if packing is not None:
        lead.append(_packing_sentence(packing))
        if of_pairs is not None:
            hardness = _hardness_of_packings(packing, of_pairs, clusters, most, seed)
    if batches is not None:
        packed = packed_pairs(packing) if packing is not None else None
        shares, masked = _of_stored(batches, packed, of_pairs, most, seed)
        hardness |= {} if masked is None else {MASKED: masked}
        blocks += _mask_blocks(batches.artifact, shares)
    if hardness and packing is not None and vectors is not None:
        lead.append(hardness_sentence(hardness, packed_name(packing)))
        blocks = _hardness_blocks(hardness, vectors, packing) + blocks
    return Section("Batches", " ".join(lead), blocks) if blocks else None


def _of_stored(
    batches: BatchReader, packed: Batches | None, of_pairs: PairVectors | None, most: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Masked share of each batch read and, where its pairs are known, its hardness without what is masked."""
    chosen = sample_of(batches.number_of_batches(_EPOCH), most, seed)
    shares, hardness = np.empty(len(chosen)), np.empty(len(chosen))
    for place, (mask, share) in enumerate(read_masks(batches, chosen)):
        shares[place] = share
        if packed is not None and of_pairs is not None:
            hardness[place] = of_pairs.hardness(packed[chosen[place]], mask)
    return shares, None if packed is None or of_pairs is None else hardness


def packed_name(packing: Artifact) -> str:
    """How the packing was made, in words."""
    settings = PackingSettings.model_validate(packing.config["packing"])
    order = "clusters along a tour" if settings.order == "tour" else RANDOM_CLUSTERS
    polish = " and swaps" if settings.polish_sweeps else ""
    return f"as packed: {order}{polish}"


def _hardness_of_packings(
    packing: Artifact, of_pairs: PairVectors, clusters: Artifact | None, most: int, seed: int
) -> dict[str, NDArray[np.float64]]:
    packed = packed_pairs(packing)
    chosen = sample_of(len(packed), most, seed)
    domains = read_clusters(clusters) if clusters is not None else None
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
    if MASKED in measured:
        sentence += f" Without the masked documents it averages {measured[MASKED].mean():.3f}."
    return sentence


def _packing_sentence(packing: Artifact) -> str:
    first = packing.shards[0]
    left_out = sum(first.dropped.values())
    sentence = (
        f"An epoch has {first.counts['batches']:,} batches of {first.facts['batch_size']} pairs"
        f" (epochs: {len(packing.shards)})"
    )
    if left_out:
        share = left_out / (left_out + first.rows)
        sentence += f"; {left_out:,} pairs ({share:.1%}) fill no batch of their domain in epoch {_EPOCH}"
    return sentence + "."


def masked_sentence(shares: NDArray[np.float64]) -> str:
    """What the masked shares (n,) of n batches say."""
    if not shares.any():
        return "No negative of these batches is masked as false."
    return (
        f"The median batch has {np.median(shares):.1%} of its negatives masked as false, the most masked one"
        f" {shares.max():.1%}."
    )


def _hardness_blocks(
    measured: Mapping[str, NDArray[np.float64]], vectors: StoredVectors, packing: Artifact
) -> list[Block]:
    colors = {packed_name(packing): BLUE, MASKED: ORANGE}
    distributions = [Distribution(name, values, colors.get(name, GREY)) for name, values in measured.items()]
    svg = ridgelines(distributions, "hardness of a batch (mean q·d of its other pairs)", "Hardness of batches")
    number = len(distributions[0].values)
    caption = (
        f"Hardness of {number:,} batches of epoch {_EPOCH} by the vectors of {folder_name(vectors)};"
        " each histogram is scaled to its own highest bar. Every row has batches of the same size of the same pairs."
    )
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


def _mask_blocks(batches: Artifact, shares: NDArray[np.float64]) -> list[Block]:
    counts = batches.manifest["counts"]
    by_rule = {name.removeprefix(_MASKED_BY): count for name, count in counts.items() if name.startswith(_MASKED_BY)}
    negatives, masked = int(counts["negatives"]), sum(by_rule.values())
    rows = [[rule, f"{count:,}", f"{count / max(negatives, 1):.2%}"] for rule, count in by_rule.items()]
    rows.append(["all rules", f"{masked:,}", f"{masked / max(negatives, 1):.2%}"])
    caption = (
        f"Of {negatives:,} negatives (all batches, all epochs); a negative counts for the first rule that masks it."
    )
    blocks: list[Block] = [masked_sentence(shares), Table(["masked by", "negatives", "share"], rows, caption)]
    if shares.any():
        label = "masked share of a batch's negatives (%)"
        svg = histogram(100 * shares, label, "batches", "Histogram of masked shares")
        blocks.append(Plot(svg, f"Share of negatives masked as false in {len(shares):,} batches of epoch {_EPOCH}."))
    return blocks
