"""The report's section on clusters: their sizes, how many of those asked for are used, how k-means got there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.clusters import read_domain
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.plots import histogram, overlaid_curves
from raytriever.reports.report import Block, Plot, Section
from raytriever.reports.table import Table

_DOMAINS_SHOWN = 12
_CURVES = 6
_COSTS = {
    "midpoint": "squared distances of the pairs' mid-points from their centroids",
    "concat": "1 - cosine between pairs, in both orientations, and their centroids",
    "swap": "1 - cosine between pairs, in the better orientation, and their centroids",
}


@dataclass(frozen=True)
class _Domain:
    """``sizes`` (K,) of a domain's clusters, and the ``facts`` of its clustering."""

    name: str
    sizes: NDArray[np.int64]
    facts: dict[str, Any]


def clusters_section(clusters: Artifact, batch_size: int | None = None) -> Section:
    """Sizes of the clusters and what each domain has; ``batch_size`` is marked where it is known."""
    domains = _domains(clusters)
    sizes = np.concatenate([domain.sizes for domain in domains])
    wanted = int(clusters.config["cluster_size"])
    marks = {f"cluster_size {wanted} (average asked for)": float(wanted)}
    if batch_size == wanted:
        marks = {f"cluster_size = batch size = {wanted}": float(wanted)}
    elif batch_size is not None:
        marks[f"batch size {batch_size}"] = float(batch_size)
    plot = histogram(
        sizes.astype(np.float64), "size (pairs)", "clusters", "Histogram of cluster sizes", marks, whole=True
    )
    blocks: list[Block] = [
        Table(["quantity", "count"], _rows(clusters, sizes, domains, batch_size)),
        Plot(plot, f"Sizes of all {len(sizes):,} clusters."),
        _domains_table(domains),
    ]
    with_curves = [domain for domain in domains if len(domain.facts["objective"]) > 1][:_CURVES]
    if with_curves:
        blocks.append(_objective_plot(clusters, with_curves, len(domains)))
    of_queries = clusters.manifest["facts"]["sides"] == "queries"
    near = "whose queries are near each other" if of_queries else "that are near each other"
    return Section("Clusters", f"Pairs of one domain {near} share a cluster.", blocks)


def _domains(clusters: Artifact) -> list[_Domain]:
    """The largest first; domain after domain is read, so that only one's assignments are held."""
    domains = []
    for number, shard in enumerate(clusters.shards):
        domain = read_domain(clusters, number)
        sizes = np.bincount(domain.clusters, minlength=len(domain.centroids)).astype(np.int64)
        domains.append(_Domain(domain.name or "(none)", sizes, shard.facts))
    return sorted(domains, key=lambda domain: (-int(domain.sizes.sum()), domain.name))


def _rows(
    clusters: Artifact, sizes: NDArray[np.int64], domains: Sequence[_Domain], batch_size: int | None
) -> list[list[str]]:
    """Names and values of what holds over all domains."""
    facts, limit = clusters.manifest["facts"], clusters.config["kmeans"]["iterations"]
    stopped = sum(domain.facts["iterations"] >= limit for domain in domains)
    rows = [
        ["pairs", f"{sizes.sum():,}"],
        ["domains", f"{len(domains):,}"],
        ["clusters asked for", f"{facts['clusters_asked_for']:,}"],
        ["clusters used", f"{np.count_nonzero(sizes):,}"],
        ["clusters that ran empty on the way and were given a far-off pair", f"{facts['refilled']:,}"],
        ["pairs of a cluster: smallest, median, largest", f"{sizes.min():,}, {np.median(sizes):,.0f}, {sizes.max():,}"],
    ]
    if batch_size is not None:
        rows.append([f"clusters of more pairs than a batch of {batch_size}", f"{np.mean(sizes > batch_size):.0%}"])
    if stopped:
        rows.append([f"domains in which k-means used all of its {limit} iterations", f"{stopped:,}"])
    if facts["pairs_with_zero_vectors"]:
        rows.append(["pairs with a vector of zeros, which are near nothing", f"{facts['pairs_with_zero_vectors']:,}"])
    return rows


def _objective_plot(clusters: Artifact, domains: Sequence[_Domain], of: int) -> Plot:
    """Curves of the largest domains."""
    curves = {}
    for domain in domains:
        objective = np.array(domain.facts["objective"])
        curves[domain.name] = 100 * objective / (objective[0] or 1.0)
    svg = overlaid_curves(curves, "iteration", "% of the start", "Objective of k-means by iteration")
    shown = "all domains" if len(domains) == of else f"the {len(domains)} largest of {of:,} domains"
    cost = _COSTS[clusters.config["kmeans"]["pairs"]]
    return Plot(svg, f"Objective of k-means, the sum of {cost}, of {shown}; 100% is that of the seeds it starts from.")


def _domains_table(domains: Sequence[_Domain]) -> Table:
    rest = domains[_DOMAINS_SHOWN:]
    rows = [_row(domain.name, [domain]) for domain in domains[:_DOMAINS_SHOWN]]
    if rest:
        rows.append(_row(f"{len(rest):,} others", rest))
    header = ["domain", "pairs", "K", "used", "mean size", "smallest", "largest", "k-means iterations", "refilled"]
    caption = "Domains by their number of pairs. Refilled: clusters that ran empty and were given a pair."
    return Table(header, rows, caption)


def _row(name: str, domains: Sequence[_Domain]) -> list[str]:
    """Of one domain, or of several together."""
    sizes = np.concatenate([domain.sizes for domain in domains])
    return [
        name,
        f"{sizes.sum():,}",
        f"{sum(domain.facts['clusters_asked_for'] for domain in domains):,}",
        f"{np.count_nonzero(sizes):,}",
        f"{sizes.mean():,.1f}",
        f"{sizes.min():,}",
        f"{sizes.max():,}",
        f"{domains[0].facts['iterations']:,}" if len(domains) == 1 else "",
        f"{sum(domain.facts['refilled'] for domain in domains):,}",
    ]
