"""The report's section on batches: how hard they are beside other ways to batch the same pairs, and what is masked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class PairVectors:
    """The vectors of every pair's query and document, gathered batch by batch."""

    query_rows: NDArray[np.int64]
    document_rows: NDArray[np.int64]
    vectors: StoredVectors

    @staticmethod
    def of(pairs: Artifact, vectors: StoredVectors) -> "PairVectors":
        """Of a pairs artifact; both must be of one collection."""
        rows = read_pairs(pairs, ["query_row", "document_row"])
        return PairVectors(rows["query_row"].to_numpy(), rows["document_row"].to_numpy(), vectors)

    def hardness(self, batches: Batches, masks: Sequence[NDArray[np.bool_]] | None = None) -> NDArray[np.float64]:
        """``batch_hardness`` of each batch of pair numbers (n, B), without the cells of ``masks``, (B, B) each."""
        queries, documents = self.vectors.part("queries"), self.vectors.part("documents")
        values = np.empty(len(batches))
        for number, batch in enumerate(batches):
            mask = masks[number] if masks is not None else None
            values[number] = batch_hardness(
                queries.gather(self.query_rows[batch]), documents.gather(self.document_rows[batch]), mask
            )
        return values


@dataclass(frozen=True)
class StoredMasks:
    """Of sampled batches: the mask over the batch's own documents, and the share of all its negatives left out."""

    masks: list[NDArray[np.bool_]]
    shares: NDArray[np.float64]


def read_masks(reader: BatchReader, numbers: NDArray[np.int64]) -> StoredMasks:
    """Reads the masks of these batches of epoch 0."""
    masks, shares = [], np.empty(len(numbers))
    for place, number in enumerate(numbers):
        batch = reader.read(_EPOCH, int(number))
        size = len(batch)
        hard_negatives = sum(map(len, batch["hard_negative_ids"].to_pylist()))
        mask = from_columns(batch["masked"].to_pylist(), size + hard_negatives)
        shares[place] = mask.sum() / max(size * (size - 1 + hard_negatives), 1)
        masks.append(mask[:, :size])
    return StoredMasks(masks, shares)


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
    stored: StoredMasks | None = None
    if batches is not None:
        total = batches.number_of_batches(_EPOCH)
        chosen = sample_of(total, most, seed)
        stored = read_masks(batches, chosen)
        lead.append(_stored_sentence(batches))
    if packing is not None and pairs is not None and vectors is not None:
        measured = _measure(packing, PairVectors.of(pairs, vectors), clusters, stored, most, seed)
        lead.append(hardness_sentence(measured, packed_name(packing)))
        blocks += _hardness_blocks(measured, vectors, packing)
    if batches is not None and stored is not None:
        lead.append(_masked_sentence(stored))
        blocks += _mask_blocks(batches.artifact, stored)
    return Section("Batches", " ".join(lead), blocks) if blocks else None


def packed_name(packing: Artifact) -> str:
    """How the packing was made, in words."""
    settings = PackingSettings.model_validate(packing.config["packing"])
    order = "clusters along a tour" if settings.order == "tour" else RANDOM_CLUSTERS
    polish = " and swaps" if settings.polish_sweeps else ""
    return f"as packed: {order}{polish}"


def _measure(
    packing: Artifact,
    vectors: PairVectors,
    clusters: Artifact | None,
    stored: StoredMasks | None,
    most: int,
    seed: int,
) -> dict[str, NDArray[np.float64]]:
    packed = packed_pairs(packing)
    chosen = sample_of(len(packed), most, seed)
    domains = read_clusters(clusters) if clusters is not None else None
    found = other_packings(packed, domains, packing, seed)
    measured = {name: vectors.hardness(batches[chosen]) for name, batches in found.items()}
    measured[packed_name(packing)] = vectors.hardness(packed[chosen])
    if stored is not None:
        measured[MASKED] = vectors.hardness(packed[chosen], stored.masks)
    return measured


def hardness_sentence(measured: Mapping[str, NDArray[np.float64]], packed: str) -> str:
    """What the numbers say of the packed batches beside random ones."""
    ours, random = measured[packed], measured[RANDOM]
    above = int((ours > random.max()).sum())
    sentence = (
        "A batch's hardness is the mean similarity between its queries and the documents of its other pairs"
        f" (Morris & Rush 2024, eq. 2). As packed it is {ours.mean():.3f} on average, in random batches of the same"
        f" pairs {random.mean():.3f}; {above:,} of {len(ours):,} packed batches are harder than the hardest random one."
    )
    if MASKED in measured:
        sentence += (
            f" Masking takes the most similar documents out, so what is left averages {measured[MASKED].mean():.3f}."
        )
    return sentence


def _stored_sentence(batches: BatchReader) -> str:
    artifact = batches.artifact
    size, total = artifact.shards[0].facts["batch_size"], artifact.manifest["counts"]["batches"]
    epochs = f"{batches.epochs} epoch{'s' if batches.epochs > 1 else ''}"
    return f"{total:,} batches of {size} pairs for {epochs}."


def _masked_sentence(stored: StoredMasks) -> str:
    return (
        f"In half of the batches {np.median(stored.shares):.1%} or more of the negatives are masked as false, in the"
        f" most masked one {stored.shares.max():.1%}."
    )


def _hardness_blocks(
    measured: Mapping[str, NDArray[np.float64]], vectors: StoredVectors, packing: Artifact
) -> list[Block]:
    colors = {packed_name(packing): BLUE, MASKED: ORANGE}
    distributions = [Distribution(name, values, colors.get(name, GREY)) for name, values in measured.items()]
    svg = ridgelines(distributions, "hardness of a batch (mean q·d of its other pairs)", "Hardness of batches")
    caption = (
        f"Hardness of {len(distributions[0].values):,} batches of epoch {_EPOCH} by the vectors of {folder_name(vectors)};"
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


def _mask_blocks(batches: Artifact, stored: StoredMasks) -> list[Block]:
    counts = batches.manifest["counts"]
    by_rule = {name.removeprefix(_MASKED_BY): count for name, count in counts.items() if name.startswith(_MASKED_BY)}
    negatives, masked = int(counts["negatives"]), sum(by_rule.values())
    rows = [[rule, f"{count:,}", f"{count / max(negatives, 1):.2%}"] for rule, count in by_rule.items()]
    rows.append(["all rules", f"{masked:,}", f"{masked / max(negatives, 1):.2%}"])
    caption = (
        f"Of {negatives:,} negatives (all batches, all epochs); a negative counts for the first rule that masks it."
    )
    svg = histogram(
        100 * stored.shares, "masked share of a batch's negatives (%)", "batches", "Histogram of masked shares"
    )
    return [
        Table(["masked by", "negatives", "share"], rows, caption),
        Plot(svg, f"Share of negatives masked as false in {len(stored.shares):,} batches of epoch {_EPOCH}."),
    ]
