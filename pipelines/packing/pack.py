"""Packing: clusters to batches of equal size, each within one domain, a new packing for every epoch.

Contextual Document Embeddings (Morris & Rush 2024, section 4.1): clusters of a domain are put in the order of a
greedy tour over their centroids, and the list of their items is cut into batches, which splits large clusters and
joins small ones with near ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipelines.packing.neighbours import EXACT_UP_TO, Neighbours, find_neighbours
from pipelines.packing.polish import Polished, VectorsOf, polish_batches
from pipelines.packing.tour import greedy_tour, tour_length
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings

Order = Literal["tour", "random", "topics"]
_DIGITS = 6  # of recorded figures
_RANDOM_ORDER = 1  # tells the generator of the order that a tour is compared with from that of the packing


class PackingSettings(Settings):
    """How a domain's clusters become batches."""

    batch_size: int = Field(gt=1)
    """Pairs of a batch."""
    order: Order = "tour"
    """Of a domain's clusters; topics: every batch of one cluster of queries (TAS-B)."""
    polish_sweeps: int = Field(default=0, ge=0)
    """Rounds of swaps that make near batches harder (eq. 2)."""
    mix_domains: bool = False
    """Random batches across domains, for comparison."""
    exact_neighbours_up_to: int = Field(default=EXACT_UP_TO, gt=0)
    """Clusters of a domain; of more, an HNSW graph finds the near ones."""


@dataclass(frozen=True)
class TourFigures:
    """Of a domain's tour: its length and that of a random order (Euclidean), and what its walk took."""

    length: float
    random_length: float
    steps: int
    dead_ends: int
    rows_scanned: int


@dataclass(frozen=True)
class GroupPacking:
    """One domain's batches of one epoch: ``batches`` int64 (batches, batch_size), numbers of its items from 0."""

    batches: NDArray[np.int64]
    tour: TourFigures | None
    polished: Polished | None


@dataclass(frozen=True)
class Packing:
    """One epoch's batches, group after group, along each group's tour.

    ``batches`` int64 (batches, batch_size): item numbers; ``groups`` int64 (batches,): the domain of each;
    ``left_out`` int64 (groups,): items of each domain in no batch of this epoch, fewer than ``batch_size``.
    """

    batches: NDArray[np.int64]
    groups: NDArray[np.int64]
    left_out: NDArray[np.int64]
    parts: tuple[GroupPacking, ...]


def pack(
    assignments: NDArray[np.int32],
    groups: NDArray[np.int64],
    centroids: Sequence[NDArray[np.float32]],
    settings: PackingSettings,
    seed: int,
    epoch: int,
    vectors: tuple[NDArray[np.floating], NDArray[np.floating]] | None = None,
    neighbours: Sequence[Neighbours] | None = None,
) -> Packing:
    """Packs N items into batches, a function of its arguments alone.

    ``assignments`` (N,): the cluster of each item within its group; ``groups`` (N,): the domain of each, an index into
    ``centroids``, whose entries are (K, d), or -1 for items to leave alone. ``vectors``: documents and queries (N, d),
    for the polish. ``neighbours``: what ``find_neighbours`` returned for each of ``centroids``, which serves all
    epochs; made here where absent. In every group fewer than ``batch_size`` items are left out; over epochs these
    rotate through all of them. Raises ``UserError`` for a group smaller than a batch, a cluster without a centroid or
    a polish without vectors.
    """
    if not centroids or assignments.shape != groups.shape:
        raise UserError(
            f"There are {len(centroids)} domains, {len(assignments)} clusters of items and {len(groups)} domains of"
            " items: at least one domain, and one cluster and one domain for every item are needed."
        )
    if groups.max(initial=-1) >= len(centroids):
        raise UserError(f"An item's domain is {groups.max()}, but there are {len(centroids)} domains, counted from 0.")
    by_group = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[by_group], np.arange(len(centroids) + 1))
    packed, parts = [], []
    for group, points in enumerate(centroids):
        items = by_group[bounds[group] : bounds[group + 1]]
        read = None if vectors is None else _vectors_of(items, *vectors)
        near = neighbours[group] if neighbours else None
        parts.append(pack_group(assignments[items], points, settings, seed, epoch, group, read, near, items))
        packed.append(items[parts[-1].batches])
    sizes = np.diff(bounds)
    numbers = np.repeat(np.arange(len(centroids)), sizes // settings.batch_size)
    return Packing(np.concatenate(packed), numbers, sizes % settings.batch_size, tuple(parts))


def _vectors_of(items: NDArray[np.int64], documents: NDArray[np.floating], queries: NDArray[np.floating]) -> VectorsOf:
    return lambda numbers: (documents[items[numbers]], queries[items[numbers]])


def pack_group(
    clusters: NDArray[np.int32],
    centroids: NDArray[np.float32],
    settings: PackingSettings,
    seed: int,
    epoch: int,
    group: int,
    vectors: VectorsOf | None = None,
    neighbours: Neighbours | None = None,
    names: NDArray[np.int64] | None = None,
) -> GroupPacking:
    """Packs one domain, number ``group`` of all: ``clusters`` (n,) of its items, ``centroids`` (K, d), as ``pack``.

    ``vectors`` reads those of the given items, for the polish. ``names``: what errors call the items.
    """
    _check_group(clusters, len(centroids), settings, vectors, names)
    generator = np.random.default_rng([seed, epoch, group])
    packed = np.ones(len(clusters), dtype=bool)
    packed[_left_out(len(clusters), settings.batch_size, seed, epoch, group)] = False
    items, figures = np.flatnonzero(packed), None
    if settings.order == "topics":
        batches = topic_batches(clusters, items, settings.batch_size, generator)
    else:
        if settings.order == "tour":
            near = neighbours or find_neighbours(centroids, settings.exact_neighbours_up_to)
            order, figures = _tour(near, generator, np.random.default_rng([seed, epoch, group, _RANDOM_ORDER]))
        else:
            order = generator.permutation(len(centroids))
        flat = items_in_order(items, clusters[items], order, generator)
        batches = cut_into_batches(flat, settings.batch_size)
    if not settings.polish_sweeps or vectors is None:
        return GroupPacking(batches, figures, None)
    polished = polish_batches(batches, vectors, settings.polish_sweeps)
    return GroupPacking(polished.batches, figures, polished)


def _tour(
    neighbours: Neighbours, generator: np.random.Generator, other: np.random.Generator
) -> tuple[NDArray[np.int64], TourFigures]:
    centroids = neighbours.centroids
    tour = greedy_tour(neighbours, int(generator.integers(len(centroids))))
    random_length = tour_length(centroids, other.permutation(len(centroids)))
    length = tour_length(centroids, tour.order)
    return tour.order, TourFigures(length, random_length, len(centroids) - 1, tour.dead_ends, tour.rows_scanned)


def items_in_order(
    items: NDArray[np.int64],
    clusters: NDArray[np.int32],
    order: NDArray[np.int64],
    generator: np.random.Generator | None,
) -> NDArray[np.int64]:
    """``items`` by the place of their cluster in ``order``, within a cluster shuffled, or as given without a generator.

    The shuffle splits large clusters differently in every epoch.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    shuffled = np.arange(len(items)) if generator is None else generator.permutation(len(items))
    return items[shuffled[np.argsort(place[clusters[shuffled]], kind="stable")]]


def topic_batches(
    clusters: NDArray[np.integer], items: NDArray[np.int64], batch_size: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """``items``, a multiple of ``batch_size``, as batches (batches, batch_size), each item in one.

    Topic-aware sampling of queries, TAS-B (Hofstätter et al. 2021, arXiv:2104.06967, section 3.2): queries are
    clustered once; every batch is composed of queries of one randomly chosen cluster.

    ``clusters[item]``: the cluster of each. A cluster's items are shuffled and cut into batches; what is left of each
    is joined with that of other clusters, these in a random order. The batches then go in a random order, so that the
    next one is of a cluster with a probability proportional to the whole batches that the cluster has left.
    """
    shuffled = generator.permutation(items)
    shuffled = shuffled[np.argsort(clusters[shuffled], kind="stable")]
    labels = clusters[shuffled]
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    sizes = np.diff(np.append(starts, len(labels)))
    place = np.arange(len(labels)) - np.repeat(starts, sizes)
    whole = place < np.repeat(sizes // batch_size * batch_size, sizes)
    turn = np.repeat(generator.permutation(len(sizes)), sizes)  # of each cluster's rest among the rests
    rest = shuffled[~whole][np.argsort(turn[~whole], kind="stable")]
    batches = np.concatenate((shuffled[whole], rest)).reshape(-1, batch_size)
    return batches[generator.permutation(len(batches))]


def cut_into_batches(flat: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """The list (n,) as (n // batch_size, batch_size); what is behind the last full batch is left out."""
    count = len(flat) // batch_size
    return flat[: count * batch_size].reshape(count, batch_size)


def _left_out(count: int, batch_size: int, seed: int, epoch: int, group: int) -> NDArray[np.int64]:
    """The items beyond the last full batch: the next run of one fixed shuffle, so that each has its turn.

    Were it the end of the tour, which walks to what lies far from all else last, outliers would hardly be trained on.
    """
    remainder = count % batch_size
    turn = np.random.default_rng([seed, group]).permutation(count)
    return turn[(epoch * remainder + np.arange(remainder)) % count]


def _check_group(
    clusters: NDArray[np.int32],
    count: int,
    settings: PackingSettings,
    vectors: VectorsOf | None,
    names: NDArray[np.int64] | None,
) -> None:
    if settings.polish_sweeps and vectors is None:
        raise UserError(f"polish_sweeps is {settings.polish_sweeps}, which needs vectors. Give them, or set it to 0.")
    if len(clusters) < settings.batch_size:
        raise UserError(
            f"A domain has {len(clusters)} pairs, fewer than the batch_size of {settings.batch_size}. Cluster again"
            " with smallest_domain set to the batch size, or lower the batch size."
        )
    strange = (clusters < 0) | (clusters >= count)
    if strange.any():
        item = int(strange.argmax())
        raise UserError(
            f"Item {item if names is None else names[item]} is in cluster {clusters[item]} of a domain with {count}"
            " clusters, counted from 0. The assignments and the centroids are not of one clustering."
        )


def figures_of(part: GroupPacking) -> dict[str, Any]:
    """What a domain adds to its epoch's facts, as JSON values: those of its tour, and of its polished batches."""
    figures: dict[str, Any] = {}
    if part.tour:
        figures["tour"] = asdict(part.tour)
    if part.polished:
        polished = part.polished
        sums = {"before": polished.before, "after": polished.after, "swaps": list(polished.swaps)}
        figures["polish"] = {"batches": len(polished.batches), **sums}
    return figures


def packing_facts(domains: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """Of the figures of an epoch's domains. ``tour``: lengths (Euclidean, over the centroids of all domains) and what
    the walks took; ``polish``: the mean d_i·q_j over i != j of one batch before and after, and the swaps of each sweep.
    Each only where it was done."""
    facts: dict[str, Any] = {}
    tours = [figures["tour"] for figures in domains if "tour" in figures]
    if tours:
        facts["tour"] = {name: sum(tour[name] for tour in tours) for name in tours[0]}
        for name in ("length", "random_length"):
            facts["tour"][name] = round(facts["tour"][name], _DIGITS)
    polished = [figures["polish"] for figures in domains if "polish" in figures]
    if polished:
        cells = sum(part["batches"] for part in polished) * batch_size * (batch_size - 1)
        sweeps = max(len(part["swaps"]) for part in polished)
        facts["polish"] = {
            "hardness_before": round(sum(part["before"] for part in polished) / cells, _DIGITS),
            "hardness_after": round(sum(part["after"] for part in polished) / cells, _DIGITS),
            "swaps": [
                sum(part["swaps"][sweep] for part in polished if sweep < len(part["swaps"])) for sweep in range(sweeps)
            ],
        }
    return facts
