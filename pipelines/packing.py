"""Packing: clusters to batches of equal size, each within one domain, a new packing for every epoch.

Contextual Document Embeddings (Morris & Rush 2024, section 4.1): clusters of a domain are put in the order of a
greedy tour over their centroids, and the list of their items is cut into batches, which splits large clusters and
joins small ones with near ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raytriever.pipelines.polish import polish_batches
from raytriever.pipelines.tour import Neighbours, find_neighbours, greedy_tour, tour_length
from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError

SmallDomains = Literal["refuse", "merge", "drop"]
MERGED = "(merged)"


class PackingSettings(Settings):
    """``order``: of a domain's clusters; ``polish_sweeps``: rounds of swaps that make near batches harder (eq. 2)."""

    batch_size: int = Field(gt=1)
    order: Literal["tour", "random"] = "tour"
    polish_sweeps: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class DomainGroups:
    """Which items are clustered and packed together.

    ``labels`` int64 (N,): the group of each item, -1 where it is dropped; ``names`` of the groups; ``dropped``: items
    of each domain that is in no group.
    """

    labels: NDArray[np.int64]
    names: tuple[str, ...]
    dropped: dict[str, int]


@dataclass(frozen=True)
class Packing:
    """One epoch's batches, group after group, along each group's tour.

    ``batches`` int64 (batches, batch_size): item numbers; ``groups`` int64 (batches,): the domain of each;
    ``left_out`` int64 (groups,): items of each domain in no batch of this epoch, fewer than ``batch_size``;
    ``tour_lengths`` float64 (groups,): Euclidean, over the domain's centroids in the order packed.
    """

    batches: NDArray[np.int64]
    groups: NDArray[np.int64]
    left_out: NDArray[np.int64]
    tour_lengths: NDArray[np.float64]


def group_domains(
    domains: Sequence[str] | NDArray[np.object_] | NDArray[np.str_], smallest: int, small_domains: SmallDomains
) -> DomainGroups:
    """Which domains are clustered and packed alone, and what becomes of those with fewer than ``smallest`` items.

    To be called before clustering, so that domains that are merged are clustered as one. ``merge``: all small ones
    form one group, dropped where even that is too small; ``drop``: they are left out; ``refuse``: a ``UserError`` that
    names them. Raises one, too, where nothing is left. Groups are in the order of their names, the merged one last.
    """
    listed = [str(domain) for domain in domains]
    names = sorted(set(listed))
    number_of = {name: number for number, name in enumerate(names)}
    codes = np.fromiter((number_of[domain] for domain in listed), dtype=np.int64, count=len(listed))
    counts = np.bincount(codes, minlength=len(names))
    is_small = counts < smallest
    if is_small.any() and small_domains == "refuse":
        raise UserError(_small_domains_message(names, counts, smallest))
    groups = [name for name, small in zip(names, is_small, strict=True) if not small]
    group_of = np.full(len(names), -1, dtype=np.int64)
    group_of[~is_small] = np.arange(len(groups))
    if small_domains == "merge" and is_small.any() and counts[is_small].sum() >= smallest:
        if MERGED in groups:
            raise UserError(f"A domain is called {MERGED!r}, the name of the small domains merged. Rename it.")
        group_of[is_small] = len(groups)
        groups.append(MERGED)
    if not groups:
        raise UserError(
            f"No domain has {smallest} pairs, nor have all together ({len(listed)}): there is not one batch. Lower"
            " smallest_domain and the batch size, or bring more pairs."
        )
    dropped = {name: int(counts[number_of[name]]) for name in names if group_of[number_of[name]] < 0}
    return DomainGroups(group_of[codes], tuple(groups), dropped)


def _small_domains_message(names: list[str], counts: NDArray[np.int64], smallest: int) -> str:
    small = [f"{name or '(none)'} ({count})" for name, count in zip(names, counts, strict=True) if count < smallest]
    return (
        f"{len(small)} domains have fewer than {smallest} pairs, so they can't fill a batch: {', '.join(small[:8])}"
        f"{', …' if len(small) > 8 else ''}. Set small_domains to merge (pack them together) or drop, or lower"
        " smallest_domain and the batch size."
    )


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
    _check(assignments, groups, centroids, settings, vectors)
    by_group = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[by_group], np.arange(len(centroids) + 1))
    packed, lengths = [], np.zeros(len(centroids))
    for group, points in enumerate(centroids):
        items = by_group[bounds[group] : bounds[group + 1]]
        generator = np.random.default_rng([seed, epoch, group])
        order = _cluster_order(points, settings.order, generator, neighbours[group] if neighbours else None)
        lengths[group] = tour_length(points, order)
        flat = items_in_order(items, assignments[items], order, generator)
        left_out = _left_out(items, settings.batch_size, seed, epoch, group)
        batches = cut_into_batches(flat[~np.isin(flat, left_out)], settings.batch_size)
        if settings.polish_sweeps and vectors is not None:
            batches = polish_batches(batches, vectors[0], vectors[1], settings.polish_sweeps)
        packed.append(batches)
    sizes = np.diff(bounds)
    return Packing(
        np.concatenate(packed),
        np.repeat(np.arange(len(centroids)), sizes // settings.batch_size),
        sizes % settings.batch_size,
        lengths,
    )


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


def cut_into_batches(flat: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """The list (n,) as (n // batch_size, batch_size); what is behind the last full batch is left out."""
    count = len(flat) // batch_size
    return flat[: count * batch_size].reshape(count, batch_size)


def _cluster_order(
    centroids: NDArray[np.float32],
    order: Literal["tour", "random"],
    generator: np.random.Generator,
    neighbours: Neighbours | None,
) -> NDArray[np.int64]:
    if order == "random":
        return generator.permutation(len(centroids))
    start = int(generator.integers(len(centroids)))
    return greedy_tour(neighbours or find_neighbours(centroids), start)


def _left_out(items: NDArray[np.int64], batch_size: int, seed: int, epoch: int, group: int) -> NDArray[np.int64]:
    """The items beyond the last full batch: the next run of one fixed shuffle, so that each has its turn.

    Were it the end of the tour, which walks to what lies far from all else last, outliers would hardly be trained on.
    """
    remainder = len(items) % batch_size
    turn = np.random.default_rng([seed, group]).permutation(items)
    return turn[(epoch * remainder + np.arange(remainder)) % len(items)]


def _check(
    assignments: NDArray[np.int32],
    groups: NDArray[np.int64],
    centroids: Sequence[NDArray[np.float32]],
    settings: PackingSettings,
    vectors: tuple[NDArray[np.floating], NDArray[np.floating]] | None,
) -> None:
    if not centroids or assignments.shape != groups.shape:
        raise UserError(
            f"There are {len(centroids)} domains, {len(assignments)} clusters of items and {len(groups)} domains of"
            " items: at least one domain, and one cluster and one domain for every item are needed."
        )
    if settings.polish_sweeps and vectors is None:
        raise UserError(f"polish_sweeps is {settings.polish_sweeps}, which needs vectors. Give them, or set it to 0.")
    if groups.max(initial=-1) >= len(centroids):
        raise UserError(f"An item's domain is {groups.max()}, but there are {len(centroids)} domains, counted from 0.")
    counted = groups >= 0
    sizes = np.bincount(groups[counted], minlength=len(centroids))
    if sizes.min() < settings.batch_size:
        raise UserError(
            f"A domain has {sizes.min()} pairs, fewer than the batch_size of {settings.batch_size}. Cluster again with"
            " smallest_domain set to the batch size, or lower the batch size."
        )
    clusters = np.array([len(points) for points in centroids])
    strange = counted & ((assignments < 0) | (assignments >= clusters[groups]))
    if strange.any():
        item = int(strange.argmax())
        raise UserError(
            f"Item {item} is in cluster {assignments[item]} of a domain with {clusters[groups[item]]} clusters, counted"
            " from 0. The assignments and the centroids are not of one clustering."
        )
