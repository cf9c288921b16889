"""How hard a packing's batches are beside other ways to batch the same pairs (Morris & Rush 2024, eq. 2)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from pipelines.clustering.clusters import DomainClusters
from pipelines.clustering.lloyd import cluster_sums
from pipelines.clustering.points import BLOCK_ROWS
from pipelines.packing.pack import PackingSettings, pack
from pipelines.packing.tour import tour_length
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.plots import BLUE, GREY, ORANGE, Distribution, ridgelines
from raytriever.reports.report import Block, Plot, folder_name
from raytriever.reports.table import Cell, Table, counted
from retrieval.vectors import StoredVectors

# What the report says of tours: how long they are beside a random order and a greedy walk taken literally.
#
# Also what the swaps after them gained.

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


# How hard a batch is: the mean similarity between its queries and the documents of its other pairs.
#
# Contextual Document Embeddings (Morris & Rush 2024), eq. 2, over ordered pairs i != j of one batch.


def batch_hardness(
    query_vectors: NDArray[np.float32], document_vectors: NDArray[np.float32], mask: NDArray[np.bool_] | None = None
) -> float:
    """Mean of q_i · d_j over i != j of one batch (B, d), without the cells of ``mask`` (B, B); 0 where none is left.

    Without a mask it is (S_q · S_d - sum_i q_i · d_i) / (B (B - 1)) with S the sums: no B x B matrix.
    """
    size = len(query_vectors)
    if size < 2:
        return 0.0
    if mask is None:
        queries, documents = query_vectors.astype(np.float64), document_vectors.astype(np.float64)
        own = float(np.einsum("nd,nd->", queries, documents))
        return (float(queries.sum(axis=0) @ documents.sum(axis=0)) - own) / (size * (size - 1))
    counted = ~mask & ~np.eye(size, dtype=bool)
    if not counted.any():
        return 0.0
    scores = query_vectors @ document_vectors.T
    return float(scores[counted].mean(dtype=np.float64))


def pair_similarity(
    documents: NDArray[np.floating], queries: NDArray[np.floating], groups: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Eq. 2 of each group, float64 (groups,): the sum over i, j in it, i = j included, of d_i·q_j + d_j·q_i.

    ``documents``, ``queries`` (N, d), may be memory-mapped; ``groups`` (N,): the group of each pair, from 0. Computed
    as 2·S_D·S_Q with S the sums of a group's vectors: linear in N.
    """
    count = int(groups.max()) + 1
    document_sums = np.zeros((count, documents.shape[1]))
    query_sums = np.zeros_like(document_sums)
    for begin in range(0, len(groups), BLOCK_ROWS):
        part = slice(begin, begin + BLOCK_ROWS)
        document_sums += cluster_sums(documents[part], groups[part], count)
        query_sums += cluster_sums(queries[part], groups[part], count)
    sums: NDArray[np.float64] = 2 * np.einsum("ij,ij->i", document_sums, query_sums)
    return sums


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
