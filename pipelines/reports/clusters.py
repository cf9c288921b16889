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
from raytriever.reports.table import Table, counted

_DOMAINS_SHOWN = 12
_CURVES = 6
_COSTS = {
    "midpoint": "squared distances of the pairs' mid-points from their centroids",
    "concat": "1 - cosine between pairs, in both orientations, and their centroids",
    "swap": "1 - cosine between pairs, in the better orientation, and their centroids",
}


@dataclass(frozen=True)
class _Domain:
    """``sizes`` (K,) of a domain's clusters, and what the clustering says of itself."""

    name: str
    sizes: NDArray[np.int64]
    facts: dict[str, Any]

    @property
    def iterations(self) -> int:
        return int(self.facts["iterations"])

    @property
    def asked_for(self) -> int:
        return int(self.facts.get("clusters_asked_for", len(self.sizes)))

    @property
    def objective(self) -> list[float]:
        return list(self.facts.get("objective", []))


def clusters_section(clusters: Artifact, batch_size: int | None = None) -> Section:
    """Sizes of the clusters and what each domain has; ``batch_size`` is marked where it is known."""
    domains = _domains(clusters)
    sizes = np.concatenate([domain.sizes for domain in domains])
    wanted = int(clusters.config["cluster_size"])
    marks = {f"cluster_size {wanted} (average asked for)": float(wanted)}
    if batch_size is not None:
        marks = (
            {f"cluster_size = batch size = {wanted}": float(wanted)}
            if batch_size == wanted
            else marks | {f"batch size {batch_size}": float(batch_size)}
        )
    plot = histogram(
        sizes.astype(np.float64), "size (pairs)", "clusters", "Histogram of cluster sizes", marks, whole=True
    )
    blocks: list[Block] = [Plot(plot, f"Sizes of all {len(sizes):,} clusters."), _domains_table(domains)]
    with_curves = _largest([domain for domain in domains if len(domain.objective) > 1])[:_CURVES]
    if with_curves:
        blocks += _objective_blocks(clusters, with_curves, len(domains))
    return Section("Clusters", _lead(clusters, sizes, domains, batch_size), blocks)


def _domains(clusters: Artifact) -> list[_Domain]:
    """Domain after domain is read, so that only one's assignments are held."""
    domains = []
    for number, shard in enumerate(clusters.shards):
        domain = read_domain(clusters, number)
        sizes = np.bincount(domain.clusters, minlength=len(domain.centroids)).astype(np.int64)
        domains.append(_Domain(domain.name or "(none)", sizes, shard.facts))
    return domains


def _largest(domains: Sequence[_Domain]) -> list[_Domain]:
    return sorted(domains, key=lambda domain: (-int(domain.sizes.sum()), domain.name))


def _lead(clusters: Artifact, sizes: NDArray[np.int64], domains: list[_Domain], batch_size: int | None) -> str:
    of_queries = clusters.manifest["facts"].get("sides") == "queries"
    lead = (
        f"Pairs of one domain {'whose queries' if of_queries else 'that'} are near each other share a cluster:"
        f" {int(sizes.sum()):,} pairs in {counted(len(sizes), 'cluster')} of {counted(len(domains), 'domain')}."
        f" The median size is {np.median(sizes):,.0f},"
        f" from {sizes.min():,} to {sizes.max():,}."
    )
    if batch_size is not None:
        lead += f" {np.mean(sizes > batch_size):.0%} of the clusters hold more pairs than a batch of {batch_size}."
    asked_for = sum(domain.asked_for for domain in domains)
    used = int((sizes > 0).sum())
    lead += f" {used:,} of the {asked_for:,} clusters asked for are used (used/K = {used / asked_for:.2f})"
    refilled = clusters.manifest["facts"].get("refilled")
    if refilled is None:
        lead += "."
    elif refilled:
        lead += f"; {refilled:,} times one that had run empty on the way was given a far-off pair."
    else:
        lead += "; none ran empty on the way."
    limit = clusters.config["kmeans"]["iterations"]
    stopped = sum(domain.iterations >= limit for domain in domains)
    if stopped:
        lead += f" In {stopped:,} of the domains k-means used all of its {limit} iterations."
    zeros = clusters.manifest["facts"].get("pairs_with_zero_vectors", 0)
    if zeros:
        lead += f" {zeros:,} pairs have a vector of zeros: nothing tells where they belong."
    return lead


def _objective_blocks(clusters: Artifact, domains: list[_Domain], of: int) -> list[Block]:
    """What the iterations of the largest domains gained, and the curve."""
    curves = {domain.name: 100 * np.array(domain.objective) / (domain.objective[0] or 1.0) for domain in domains}
    cost = _COSTS.get(clusters.config["kmeans"]["pairs"], "costs")
    svg = overlaid_curves(curves, "iteration", "% of the start", "Objective of k-means by iteration")
    shown = "all domains" if len(domains) == of else f"the {len(domains)} largest of {of:,} domains"
    caption = f"Objective of k-means, the sum of {cost}, of {shown}; 100% is that of the seeds it starts from."
    where = f"In the largest domain, '{domains[0].name}', " if of > 1 else ""
    return [where + objective_sentence(domains[0].objective), Plot(svg, caption)]


def objective_sentence(objective: Sequence[float]) -> str:
    """How far k-means took the objective, and how much of that in the first iteration."""
    first, second, last = objective[0], objective[1], objective[-1]
    gained = first - last
    iterations = len(objective) - 1
    if gained <= 0:
        return "k-means found nothing to gain over its seeds."
    return (
        f"{counted(iterations, 'iteration')} of k-means together lower the objective by {gained / first:.1%};"
        f" {(first - second) / gained:.0%} of that is the first one's."
    )


def _domains_table(domains: list[_Domain]) -> Table:
    largest = _largest(domains)
    shown, rest = largest[:_DOMAINS_SHOWN], largest[_DOMAINS_SHOWN:]
    cells = [
        _row(domain.name, domain.sizes, domain.asked_for, f"{domain.iterations:,}", domain.facts.get("refilled"))
        for domain in shown
    ]
    if rest:
        sizes, asked_for = np.concatenate([domain.sizes for domain in rest]), sum(domain.asked_for for domain in rest)
        cells.append(_row(f"{len(rest):,} others", sizes, asked_for, "", sum(d.facts.get("refilled", 0) for d in rest)))
    header = ["domain", "pairs", "K", "used", "mean size", "smallest", "largest", "k-means iterations", "refilled"]
    caption = "Domains by their number of pairs. Refilled: clusters that ran empty and were given a pair."
    return Table(header, cells, caption)


def _row(name: str, sizes: NDArray[np.int64], asked_for: int, iterations: str, refilled: int | None) -> list[str]:
    return [
        name,
        f"{sizes.sum():,}",
        f"{asked_for:,}",
        f"{np.count_nonzero(sizes):,}",
        f"{sizes.mean():,.1f}",
        f"{sizes.min():,}",
        f"{sizes.max():,}",
        iterations,
        "" if refilled is None else f"{refilled:,}",
    ]
