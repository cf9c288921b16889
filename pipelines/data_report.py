"""The report's sections on the data: the collection, its pairs, what was left out on the way, the clusters."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytriever.pipelines.clusters import read_clusters
from raytriever.pipelines.pairs import read_pairs
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.plots import histogram
from raytriever.retrieval.provenance_report import folder_name
from raytriever.retrieval.report import Block, Cell, Plot, Section, Table

_DOMAINS_SHOWN = 12


def data_section(
    collection: StoredCollection | None, pairs: Artifact | None, artifacts: Iterable[Artifact]
) -> Section | None:
    """None where there is neither. ``artifacts``: whose manifests may count what was dropped."""
    if collection is None and pairs is None:
        return None
    lead, rows, blocks = [], [], []
    if collection is not None:
        documents, queries = collection.count("documents"), collection.count("queries")
        source = _source(collection.config, collection.manifest["facts"])
        lead.append(f"The collection ({source}) has {documents:,} documents and {queries:,} queries.")
        rows += _collection_rows(collection)
    if pairs is not None:
        domains = Counter(read_pairs(pairs, ["domain"])["domain"].to_pylist())
        lead.append(_pairs_sentence(pairs, domains))
        rows += _pairs_rows(pairs, domains)
    blocks.append(Table(["quantity", "count"], rows))
    dropped = _dropped_table(artifacts)
    if dropped is None:
        lead.append("No stage reports that it dropped anything.")
    else:
        blocks.append(dropped)
    return Section("Data", " ".join(lead), blocks)


def _collection_rows(collection: StoredCollection) -> list[Sequence[str | Cell]]:
    counts = dict(collection.manifest["counts"])
    rows: list[Sequence[str | Cell]] = [
        [part, f"{counts.pop(part, 0):,}"] for part in ("documents", "queries", "judgments")
    ]
    splits: Counter[str] = Counter()
    for table in collection.rows_of("judgments").tables(["split"]):
        splits.update({item["values"]: item["counts"] for item in pc.value_counts(table["split"]).to_pylist()})
    rows += [[f"judgments of split '{split}'", f"{count:,}"] for split, count in sorted(splits.items())]
    rows += [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items()]
    return rows


def _source(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    kind = str(config.get("source", {}).get("kind", "unknown")).replace("_", " ")
    if "python" in facts:
        kind += f", {facts.get('implementation', 'Python')} {facts['python']}"
    return kind


def _pairs_sentence(pairs: Artifact, domains: Mapping[str, int]) -> str:
    split = pairs.config.get("split")
    of_split = f" of split '{split}'" if split else ""
    largest = max(domains, key=lambda name: domains[name])
    sentence = f"Training has {pairs.rows:,} pairs{of_split} in {len(domains):,} domains"
    if len(domains) > 1:
        sentence += f"; the largest, '{largest}', holds {domains[largest] / pairs.rows:.1%} of them"
    return sentence + "."


def _pairs_rows(pairs: Artifact, domains: Mapping[str, int]) -> list[Sequence[str | Cell]]:
    counts = pairs.manifest["counts"]
    sizes = np.array(list(domains.values()))
    rows: list[Sequence[str | Cell]] = [["training pairs", f"{pairs.rows:,}"]]
    rows += [
        [f"distinct {part} of the pairs", f"{counts[part]:,}"] for part in ("queries", "documents") if part in counts
    ]
    rows.append(["domains of the pairs", f"{len(domains):,}"])
    rows.append(["pairs per domain: median, largest", f"{np.median(sizes):,.0f}, {sizes.max():,}"])
    return rows


def _dropped_table(artifacts: Iterable[Artifact]) -> Table | None:
    rows = [
        [folder_name(artifact), reason.replace("_", " "), f"{count:,}"]
        for artifact in artifacts
        for reason, count in artifact.manifest["dropped"].items()
        if count
    ]
    if not rows:
        return None
    return Table(["stage", "dropped", "count"], rows, "What stages left out, over all epochs.", text_columns=2)


def clusters_section(clusters: Artifact, batch_size: int | None = None) -> Section:
    """Sizes of the clusters and what each domain has; ``batch_size`` is marked where it is known."""
    rows = []
    sizes: list[NDArray[np.int64]] = []
    for shard, domain in zip(clusters.shards, read_clusters(clusters), strict=True):
        of_domain = np.bincount(domain.clusters, minlength=len(domain.centroids))
        sizes.append(of_domain)
        rows.append((domain.name, of_domain, int(shard.facts["iterations"])))
    everything = np.concatenate(sizes)
    wanted = int(clusters.config["cluster_size"])
    marks = {f"cluster_size {wanted} (average asked for)": float(wanted)}
    if batch_size is not None:
        marks = (
            {f"cluster_size = batch size = {wanted}": float(wanted)}
            if batch_size == wanted
            else marks | {f"batch size {batch_size}": float(batch_size)}
        )
    plot = histogram(
        everything.astype(np.float64), "size (pairs)", "clusters", "Histogram of cluster sizes", marks, whole=True
    )
    blocks: list[Block] = [Plot(plot, f"Sizes of all {len(everything):,} clusters."), _domains_table(rows)]
    return Section("Clusters", _clusters_lead(clusters, everything, rows, batch_size), blocks)


def _clusters_lead(
    clusters: Artifact, sizes: NDArray[np.int64], rows: list[tuple[str, Any, int]], batch_size: int | None
) -> str:
    lead = (
        f"Pairs of one domain that are near each other share a cluster: {int(sizes.sum()):,} pairs in {len(sizes):,}"
        f" clusters of {len(rows):,} domain{'s' if len(rows) > 1 else ''}. The median size is {np.median(sizes):,.0f},"
        f" from {sizes.min():,} to {sizes.max():,}."
    )
    if batch_size is not None:
        lead += f" {np.mean(sizes > batch_size):.0%} of the clusters hold more pairs than a batch of {batch_size}."
    limit = clusters.config["kmeans"]["iterations"]
    stopped = sum(iterations >= limit for _, _, iterations in rows)
    if stopped:
        lead += f" In {stopped:,} of the domains k-means used all of its {limit} iterations."
    return lead


def _domains_table(rows: list[tuple[str, Any, int]]) -> Table:
    largest = sorted(rows, key=lambda row: (-int(row[1].sum()), row[0]))
    shown, rest = largest[:_DOMAINS_SHOWN], largest[_DOMAINS_SHOWN:]
    cells = [_domain_row(name, sizes, f"{iterations:,}") for name, sizes, iterations in shown]
    if rest:
        cells.append(_domain_row(f"{len(rest):,} others", np.concatenate([sizes for _, sizes, _ in rest]), ""))
    header = ["domain", "pairs", "clusters", "mean size", "smallest", "largest", "k-means iterations"]
    return Table(header, cells, "Domains by their number of pairs.")


def _domain_row(name: str, sizes: NDArray[np.int64], iterations: str) -> list[str]:
    return [
        name or "(none)",
        f"{sizes.sum():,}",
        f"{len(sizes):,}",
        f"{sizes.mean():,.1f}",
        f"{sizes.min():,}",
        f"{sizes.max():,}",
        iterations,
    ]
