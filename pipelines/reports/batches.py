"""The report's sections on clusters and on batches: how hard these are beside random ones, and what is masked in them.

Figures are those of the manifests; hardness is measured on a sample of the first epoch that has the fewest shuffled
batches.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.batch_description import batch_matrix, describe_batch
from pipelines.batches import BatchReader, mask_of
from pipelines.clustering.pair_vectors import StoredPairs
from pipelines.filtering.false_negatives import batch_hardness
from pipelines.filtering.hard_negatives import FILLED
from pipelines.filtering.mask_audit import example_table, mask_table
from pipelines.pairs.pairs import numbered_domains, read_pairs
from pipelines.reports.data import sample_of
from raytriever.artifacts.artifact import Artifact, origin
from raytriever.reports.plots import heat_map
from raytriever.reports.report import Block, Details, Plot, Section
from raytriever.reports.table import Table, counted
from retrieval.collections.collection import ParquetRows
from retrieval.vectors import StoredVectors

PACKED, RANDOM, MASKED = "as packed", "random, within domains", "as packed, without what is masked"
_ROWS_SHOWN = 12  # domains of a table, epochs of a packing
_AUDIT = "audit.json"

Batches = NDArray[np.int64]  # pair numbers, (batches, B)


def clusters_section(clusters: Artifact) -> Section:
    """The number of clusters in each domain, their mean size, and the course of k-means."""
    ordered = sorted(clusters.shards, key=lambda shard: (-shard.rows, shard.facts["domain"]))
    rows = [
        [
            str(shard.facts["domain"]) or "(none)",
            f"{shard.rows:,}",
            f"{shard.facts['clusters_asked_for']:,}",
            f"{shard.counts['clusters']:,}",
            f"{shard.rows / shard.counts['clusters']:,.1f}",
            f"{shard.facts['iterations']:,}",
            f"{shard.facts['refilled']:,}",
            f"{shard.facts['pairs_with_zero_vectors']:,}",
        ]
        for shard in ordered[:_ROWS_SHOWN]
    ]
    header = ["domain", "pairs", "asked for", "clusters", "mean size", "iterations", "refilled", "zero vectors"]
    caption = (
        f"The largest of {counted(len(ordered), 'domain')}. Refilled: clusters that ran empty and were given a pair."
        " Zero vectors: pairs with one, which are near nothing."
    )
    lead = "Pairs of one domain that are near each other share a cluster."
    return Section("Clusters", lead, [Table(header, rows, caption)])


def batches_section(
    packing: Artifact | None,
    pairs: Artifact | None,
    vectors: StoredVectors | None,
    batches: BatchReader | None,
    most: int,
    seed: int,
) -> Section | None:
    """Sizes (of ``packing``), hardness (needs pairs and vectors too), what ``batches`` hold.

    None where there is neither packing nor batches. Hardness is that of at most ``most`` batches, a sample by ``seed``
    where there are more.
    """
    if packing is None and batches is None:
        return None
    rows = [] if packing is None else _packing_rows(packing)
    if batches is not None:
        counts = batches.artifact.manifest["counts"]
        what = "queries" if batches.layout == "candidates" else batches.layout
        rows += [
            ["epochs of stored batches", f"{batches.epochs:,}"],
            ["stored batches", f"{counts['batches']:,}"],
            [f"{what} of a stored batch", f"{batches.batch_size:,}"],
            *([name, f"{counts[name]:,}"] for name in FILLED if counts.get(name)),
        ]
    blocks: list[Block] = [Table(["quantity", "count"], rows)]
    if packing is not None and pairs is not None and vectors is not None:
        is_its_own = batches is not None and origin(batches.artifact, "packing") == packing.fingerprint
        measured = hardness(packing, stored_pairs(pairs, vectors), batches if is_its_own else None, most, seed)
        blocks.append(_hardness_table(measured))
    if batches is not None and batches.layout == "pairs":
        blocks += _mask_blocks(batches.artifact)
        blocks += _batch_blocks(batches, packing, vectors) if vectors is not None else []
    return Section("Batches", "Which examples are trained on together.", blocks)


def _packing_rows(packing: Artifact) -> list[list[str]]:
    first = packing.shards[0]
    again = first.rows - first.facts["pairs"]
    return [
        ["epochs packed", f"{len(packing.shards):,}"],
        ["packed batches of an epoch", f"{first.counts['batches']:,}"],
        ["pairs of a packed batch", f"{first.facts['batch_size']:,}"],
        ["pairs twice in epoch 0, to fill last batches", f"{again:,} ({again / first.rows:.1%})"],
    ]


def stored_pairs(pairs: Artifact, vectors: StoredVectors) -> StoredPairs:
    """All pairs with their vectors; both are of one collection."""
    rows = read_pairs(pairs, ["query_row", "document_row"])
    queries, documents = (column.to_numpy() for column in rows.columns)
    return StoredPairs(vectors, query_rows=queries, document_rows=documents)


def hardness_of(pairs: StoredPairs, batch: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> float:
    """``batch_hardness`` of these pair numbers (B,), without the cells of ``mask`` (B, B)."""
    queries, documents = pairs.take(batch)
    return batch_hardness(queries=queries, documents=documents, mask=mask)


def hardness(
    packing: Artifact, of_pairs: StoredPairs, batches: BatchReader | None, most: int, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Hardness of at most ``most`` packed batches and of as many random ones of the same pairs, float64 (n,) each.

    ``batches``: those made of this packing, None where there are none; with them that without what they mask.
    """
    epoch = hardest_epoch(packing)
    packed = packed_pairs(packing, epoch)
    chosen = sample_of(len(packed), most, seed)
    found = {PACKED: packed, RANDOM: random_packing(packed, packing, epoch, seed)}
    measured = {name: np.array([hardness_of(of_pairs, batch) for batch in found[name][chosen]]) for name in found}
    if batches is not None and batches.layout == "pairs":
        masks = (
            (packed[number], mask_of(batches.read(epoch, number))[:, : packed.shape[1]]) for number in chosen.tolist()
        )
        # of a batch without any negative left there is no mean
        kept = [hardness_of(of_pairs, batch, mask) for batch, mask in masks if mask.sum() < len(mask) * (len(mask) - 1)]
        measured |= {MASKED: np.array(kept)} if kept else {}
    return measured


def hardest_epoch(packing: Artifact) -> int:
    """The first epoch with the fewest shuffled batches."""
    return min(range(len(packing.shards)), key=lambda epoch: int(packing.shards[epoch].facts["shuffled"]))


def packed_pairs(packing: Artifact, epoch: int = 0) -> Batches:
    """The batches of an epoch."""
    pairs = _packed(packing, epoch, "pair").to_numpy()
    return np.asarray(pairs, dtype=np.int64).reshape(-1, int(packing.shards[epoch].facts["batch_size"]))


def _packed(packing: Artifact, epoch: int, column: str) -> pa.ChunkedArray:
    return ParquetRows(packing, [file.name for file in packing.shards[epoch].files]).read([column])[column]


def random_packing(packed: Batches, packing: Artifact, epoch: int, seed: int) -> Batches:
    """The same pairs in random batches within their domains: where the packing has a domain, so has this one."""
    domains, _ = numbered_domains(_packed(packing, epoch, "domain"))
    shuffled = np.random.default_rng([seed, 0]).permutation(packed.size)
    found = np.empty(packed.size, dtype=np.int64)
    found[np.argsort(domains, kind="stable")] = packed.ravel()[shuffled[np.argsort(domains[shuffled], kind="stable")]]
    return found.reshape(packed.shape)


def _hardness_table(measured: Mapping[str, NDArray[np.float64]]) -> Table:
    hardest = measured[RANDOM].max()
    rows = [
        [
            name,
            f"{len(values):,}",
            f"{values.mean():.4f}",
            f"{values.std(ddof=min(1, len(values) - 1)):.4f}",
            f"{values.min():.4f}",
            f"{values.max():.4f}",
            f"{np.count_nonzero(values > hardest):,}",
        ]
        for name, values in measured.items()
    ]
    header = ["batches", "number", "mean", "standard deviation", "easiest", "hardest", "harder than all random ones"]
    caption = (
        "Hardness: the mean similarity between a batch's queries and the documents of its other pairs (Morris & Rush"
        " 2024, eq. 2)."
    )
    return Table(header, rows, caption)


def _mask_blocks(batches: Artifact) -> list[Block]:
    """Negatives masked by each rule, as `raytriever filter` wrote them. For mixed batches by any rule."""
    if _AUDIT in batches.names(""):
        audit = batches.read_json(_AUDIT)
        return [mask_table(audit), Details("Examples of what each rule masked", example_table(audit))]
    counts = batches.manifest["counts"]
    masked = int(counts["masked by any rule"])
    return [
        Table(["masked by", "masked", "share"], [["any rule", f"{masked:,}", f"{masked / counts['negatives']:.2%}"]])
    ]


def _batch_blocks(batches: BatchReader, packing: Artifact | None, vectors: StoredVectors) -> list[Block]:
    """One batch as a matrix, with its texts."""
    epoch = 0 if packing is None else min(hardest_epoch(packing), batches.epochs - 1)
    lines = list(describe_batch(batches, epoch, 0))
    caption = f"{lines[0]}. Rows: queries; columns: documents, then hard negatives. Orange: masked."
    plot = Plot(heat_map(*batch_matrix(batches.read(epoch, 0), vectors), lines[0]), caption)
    return [plot, Details("Texts of this batch", "\n".join(lines))]
