"""What the report says of tours: how long they are beside a random order and a greedy walk taken literally.

Also what the swaps after them gained.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from raytriever.pipelines.clusters import DomainClusters
from raytriever.pipelines.packing.tour import tour_length
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.plain_text import counted
from raytriever.retrieval.report import Block, Cell, Table

LITERAL_UP_TO = 2048  # clusters of a domain whose distances are all computed: 32 MiB
_EPOCHS_SHOWN = 12


def literal_tour(centroids: NDArray[np.floating], start: int) -> NDArray[np.int64]:
    """The greedy tour as the paper has it, K steps that each look at all K clusters, int64 (K,).

    Morris & Rush 2024 (arXiv:2410.02525), section 4.1: from each cluster to the nearest unvisited one; the lowest
    index on ties. ``centroids`` (K, d).
    """
    points = np.asarray(centroids, dtype=np.float64)
    distances = cdist(points, points, "sqeuclidean")
    order = np.empty(len(points), dtype=np.int64)
    order[0] = start
    for step in range(1, len(points)):
        distances[:, order[step - 1]] = np.inf
        order[step] = distances[order[step - 1]].argmin()
    return order


def literal_length(packing: Artifact, domains: Sequence[DomainClusters], epoch: int) -> float | None:
    """The length of all domains' literal tours from where those of the epoch start; None where it takes too long."""
    if sum(len(domain.centroids) ** 2 for domain in domains) > LITERAL_UP_TO**2:
        return None
    seed, total = int(packing.config["seed"]), 0.0
    for number, domain in enumerate(domains):
        # the first draw of a domain's packing is where its tour starts
        start = int(np.random.default_rng([seed, epoch, number]).integers(len(domain.centroids)))
        total += tour_length(domain.centroids, literal_tour(domain.centroids, start))
    return total


def tour_blocks(packing: Artifact, domains: Sequence[DomainClusters] | None) -> list[Block]:
    """Sentences and a table, epoch by epoch; empty where nothing was toured or polished."""
    epochs = [shard.facts for shard in packing.shards]
    blocks: list[Block] = []
    if all("tour" in facts for facts in epochs):
        literal = None if domains is None else literal_length(packing, domains, int(epochs[0]["epoch"]))
        exact = packing.manifest["facts"].get("neighbours") == "exact"
        blocks += [tour_sentence(epochs[0]["tour"], literal, exact=exact), _tour_table(epochs, literal)]
    if all("polish" in facts for facts in epochs):
        blocks += [polish_sentence(epochs[0]["polish"]), _polish_table(epochs)]
    return blocks


def tour_sentence(tour: dict[str, Any], literal: float | None, *, exact: bool) -> str:
    """What the lengths of one epoch's tours say."""
    steps = int(tour["steps"])
    if not steps:
        return "Every domain has one cluster, so there is no order to choose."
    share = tour["length"] / tour["random_length"] if tour["random_length"] else 1.0
    sentence = (
        "Clusters that follow on one another fill batches together, so their order should lead from one to a near one."
        f" The tours' {steps:,} steps add up to {tour['length']:,.2f}, {share:.0%} of what the same clusters in random"
        " order give."
    )
    if literal is not None:
        gap = tour["length"] / literal - 1 if literal else 0.0
        same = "the same length" if abs(gap) < 1e-5 else f"{literal:,.2f} ({gap:+.2%} for the one stored)"
        sentence += f" A greedy walk that looks at all clusters in every step, from the same starts, gives {same}."
    elif exact:
        sentence += " Neighbours were exact, so the order is that of a greedy walk over all clusters."
    else:
        sentence += " Neighbours were those of an HNSW graph, so a step may have missed the nearest cluster."
    return sentence


def _tour_table(epochs: Sequence[dict[str, Any]], literal: float | None) -> Table:
    rows: list[Sequence[str | Cell]] = []
    for place, facts in enumerate(epochs[:_EPOCHS_SHOWN]):
        tour = facts["tour"]
        share = tour["length"] / tour["random_length"] if tour["random_length"] else 1.0
        row = [str(facts["epoch"]), f"{tour['length']:,.3f}", f"{tour['random_length']:,.3f}", f"{share:.1%}"]
        row.append(f"{literal:,.3f}" if literal is not None and not place else "")
        rows.append([*row, f"{tour['dead_ends']:,}", f"{tour['rows_scanned']:,}"])
    header = ["epoch", "tour", "random order", "share", "literal greedy", "dead ends", "clusters scanned there"]
    caption = (
        "Lengths: Euclidean distances between the centroids of clusters that follow on one another, all domains. Dead"
        " end: a step in which the list of near clusters was used up."
    )
    return Table(header, rows, caption + _more(epochs))


def polish_sentence(polish: dict[str, Any]) -> str:
    """What the swaps of one epoch gained."""
    before, after, swaps = polish["hardness_before"], polish["hardness_after"], polish["swaps"]
    gain = f" ({after / before - 1:+.1%})" if before > 0 else ""
    return (
        f"Swaps between batches near one another, {sum(swaps):,} in {counted(len(swaps), 'sweep')}, take the mean"
        f" hardness from {before:.4f} to {after:.4f}{gain}."
    )


def _polish_table(epochs: Sequence[dict[str, Any]]) -> Table:
    rows: list[Sequence[str | Cell]] = [
        [
            str(facts["epoch"]),
            f"{facts['polish']['hardness_before']:.4f}",
            f"{facts['polish']['hardness_after']:.4f}",
            ", ".join(f"{number:,}" for number in facts["polish"]["swaps"]),
        ]
        for facts in epochs[:_EPOCHS_SHOWN]
    ]
    caption = "Mean hardness (eq. 2, over all batches of the epoch) before and after the swaps." + _more(epochs)
    return Table(["epoch", "before", "after", "swaps of each sweep"], rows, caption)


def _more(epochs: Sequence[dict[str, Any]]) -> str:
    return f" The first {_EPOCHS_SHOWN} of {len(epochs):,} epochs." if len(epochs) > _EPOCHS_SHOWN else ""
