"""What the report says of a packing: how hard its batches are beside random ones, its tours and its swaps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.packing.hardness import batch_hardness
from pipelines.packing.pack import PackingSettings
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.plots import BLUE, GREY, ORANGE, Distribution, ridgelines
from raytriever.reports.report import Block, Plot, folder_name
from raytriever.reports.table import Table
from retrieval.vectors import StoredVectors

EPOCH = 0
RANDOM = "random"
RANDOM_IN_DOMAIN = "random within each domain"
MASKED = "as packed, masked out"
_EPOCHS_SHOWN = 12
_ORDERS = {"tour": "tour of clusters", "topics": "one topic a batch", "random": "clusters in random order"}

Batches = NDArray[np.int64]  # pair numbers, (batches, B)


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
    """The batches of epoch 0."""
    pairs = pq.read_table(packing.path(_file()), columns=["pair"])["pair"].to_numpy()
    return np.asarray(pairs, dtype=np.int64).reshape(-1, int(packing.shards[EPOCH].facts["batch_size"]))


def _file() -> str:
    return f"epoch={EPOCH:05d}/packing.parquet"


def random_packings(packed: Batches, packing: Artifact, seed: int) -> dict[str, Batches]:
    """Random batches of the very same pairs, as many and as large; of clusters of several domains also within these."""
    generator = np.random.default_rng([seed, 0])
    found = {RANDOM: generator.permutation(packed.ravel()).reshape(packed.shape)}
    labels = _domain_labels(packing)
    if "clusters" in packing.manifest["inputs"] and labels.any():
        shuffled = generator.permutation(packed.size)
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
        within = np.empty(packed.size, dtype=np.int64)
        within[np.argsort(labels, kind="stable")] = packed.ravel()[shuffled]
        found[RANDOM_IN_DOMAIN] = within.reshape(packed.shape)
    return found


def _domain_labels(packing: Artifact) -> NDArray[np.integer]:
    """The number of each packed pair's domain; their names are never held once for each pair."""
    table = pq.read_table(packing.path(_file()), columns=["domain"], read_dictionary=["domain"])
    chunks = table.unify_dictionaries()["domain"].chunks
    return np.concatenate([chunk.indices.to_numpy() for chunk in chunks])


def packed_name(packing: Artifact) -> str:
    """How the packing was made, in words."""
    settings = PackingSettings.model_validate(packing.config["packing"])
    if settings.mix_domains:
        order = "random across domains"
    elif "clusters" not in packing.manifest["inputs"]:
        order = RANDOM_IN_DOMAIN
    else:
        order = _ORDERS[settings.order]
    return f"as packed: {order}{', swaps' if settings.polish_sweeps else ''}"


def packing_rows(packing: Artifact) -> list[list[str]]:
    """How many batches of which size an epoch has, and what it leaves out: names and values."""
    first = packing.shards[EPOCH]
    left_out = sum(first.dropped.values())
    return [
        ["epochs", f"{len(packing.shards):,}"],
        ["batches of an epoch", f"{first.counts['batches']:,}"],
        ["pairs of a batch", f"{first.facts['batch_size']:,}"],
        [f"pairs in no batch of epoch {EPOCH}", f"{left_out:,} ({left_out / (left_out + first.rows):.1%})"],
    ]


def hardness_of_packings(
    packing: Artifact, of_pairs: PairVectors, chosen: NDArray[np.int64], seed: int
) -> dict[str, NDArray[np.float64]]:
    """Hardness of the ``chosen`` batches (n,) of the packing, and of as many random ones of its pairs."""
    packed = packed_pairs(packing)
    found = random_packings(packed, packing, seed) | {packed_name(packing): packed}
    return {name: np.array([of_pairs.hardness(batch) for batch in batches[chosen]]) for name, batches in found.items()}


def hardness_blocks(
    measured: Mapping[str, NDArray[np.float64]], vectors: StoredVectors, packing: Artifact
) -> list[Block]:
    """The distributions, drawn and in figures."""
    colors = {packed_name(packing): BLUE, MASKED: ORANGE}
    distributions = [Distribution(name, values, colors.get(name, GREY)) for name, values in measured.items()]
    svg = ridgelines(distributions, "hardness of a batch (mean q·d of its other pairs)", "Hardness of batches")
    number, hardest = len(distributions[0].values), measured[RANDOM].max()
    caption = (
        f"Hardness of {number:,} batches of epoch {EPOCH} by the vectors of {folder_name(vectors)}: the mean similarity"
        " between a batch's queries and the documents of its other pairs (Morris & Rush 2024, eq. 2). Every row has"
        " batches of the same size of the same pairs; each histogram is scaled to its own highest bar."
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
            f"{np.count_nonzero(v > hardest):,}",
        ]
        for name, v in measured.items()
    ]
    header = ["batches", "number", "mean", "standard deviation", "easiest", "hardest", "harder than all random ones"]
    return [Plot(svg, caption), Table(header, rows)]


def tour_blocks(packing: Artifact) -> list[Block]:
    """A table of tours and one of swaps, epoch by epoch; empty where nothing was toured or polished."""
    epochs = [shard.facts for shard in packing.shards]
    shown = epochs[:_EPOCHS_SHOWN]
    more = f" The first {_EPOCHS_SHOWN} of {len(epochs):,} epochs." if len(epochs) > _EPOCHS_SHOWN else ""
    blocks: list[Block] = []
    if all("tour" in facts for facts in epochs):
        exact = packing.manifest["facts"].get("neighbours") == "exact"
        header = ["epoch", "steps", "tour", "random order", "share", "dead ends", "clusters scanned there"]
        caption = (
            "Lengths: Euclidean distances between the centroids of clusters that follow on one another, all domains;"
            f" neighbours were {'exact' if exact else 'those of an HNSW graph'}. Dead end: a step in which the list of"
            f" near clusters was used up.{more}"
        )
        blocks.append(Table(header, [_tour_row(facts) for facts in shown], caption))
    if all("polish" in facts for facts in epochs):
        caption = f"Mean hardness (eq. 2, over all batches of the epoch) before and after the swaps.{more}"
        rows = [_polish_row(facts) for facts in shown]
        blocks.append(Table(["epoch", "before", "after", "gain", "swaps of each sweep"], rows, caption))
    return blocks


def _tour_row(facts: Mapping[str, Any]) -> list[str]:
    tour = facts["tour"]
    share = tour["length"] / tour["random_length"] if tour["random_length"] else 1.0
    lengths = [f"{tour['length']:,.3f}", f"{tour['random_length']:,.3f}", f"{share:.1%}"]
    return [str(facts["epoch"]), f"{tour['steps']:,}", *lengths, f"{tour['dead_ends']:,}", f"{tour['rows_scanned']:,}"]


def _polish_row(facts: Mapping[str, Any]) -> list[str]:
    before, after = facts["polish"]["hardness_before"], facts["polish"]["hardness_after"]
    gain = f"{after / before - 1:+.1%}" if before > 0 else ""
    swaps = ", ".join(f"{number:,}" for number in facts["polish"]["swaps"])
    return [str(facts["epoch"]), f"{before:.4f}", f"{after:.4f}", gain, swaps]
