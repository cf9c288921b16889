"""Packing: clusters to batches of equal size, each within one domain, a new packing for every epoch.

Contextual Document Embeddings (Morris & Rush 2024, section 4.1). Clusters of a domain are put in the order of a greedy
tour over their centroids. The list of their items is cut into batches. This splits large clusters and joins small ones
with near ones. What remains is a last batch, filled with items of the first.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, Share

if TYPE_CHECKING:
    from pipelines.packing.polish import VectorsOf

Order = Literal["tour", "random", "topics"]
CLUSTERS_OF_A_REGION = 1 << 15  # about, at most; lists of neighbours cost the square of their number


class PackingSettings(Settings):
    """How a domain's clusters become batches."""

    batch_size: int = Field(gt=1)
    """Number of pairs in a batch."""
    order: Order = "tour"
    """Order of a domain's clusters. topics: every batch comes from one cluster of queries (TAS-B)."""
    shuffled: Share | tuple[Share, ...] = 0.0
    """Share of a domain's batches with randomly redistributed pairs. A list has a share for each epoch, in turn."""
    polish_sweeps: NonNegativeInt = 0
    """Rounds of swaps that make near batches harder (eq. 2)."""
    region_pairs: PositiveInt = 1 << 20
    """A domain with more pairs is divided into regions of near clusters, or of any pairs if there are no clusters. One
    task packs one region. Shuffled pairs are redistributed across regions."""

    def shuffled_share(self, epoch: int) -> float:
        """The shuffled share of a domain's batches in this epoch."""
        return self.shuffled[epoch % len(self.shuffled)] if isinstance(self.shuffled, tuple) else self.shuffled

    def _check(self) -> None:
        if self.region_pairs < 2 * self.batch_size:
            raise ValueError(
                f"region_pairs is {self.region_pairs}, less than two batches of {self.batch_size}, so each region"
                " would repeat many pairs. Raise it"
            )
        if self.shuffled == ():
            raise ValueError("shuffled is an empty list. Give one share, or one for each epoch in turn, such as [1, 0]")


def number_of_regions(pairs: int, clusters: int, region_pairs: int) -> int:
    """Number of regions of a domain, so that none has more than about ``region_pairs``. 1 for a smaller domain.

    A greedy tour takes one step after another, so a domain of one tour is one task, however large. Batches hold near
    clusters, and swaps go no further than a few batches. So little is lost where two regions meet
    (docs/reports/benchmarks.md).
    """
    return max(1, min(clusters, max(-(-pairs // region_pairs), -(-clusters // CLUSTERS_OF_A_REGION))))


@dataclass(frozen=True)
class Packing:
    """One domain's batches of one epoch: ``batches`` int64 (batches, batch_size), numbers of its items from 0.

    ``shuffled``: how many of them have redistributed pairs. ``aside`` int64 (n,): items of a region, to be
    redistributed with those of the domain's other regions.
    """

    batches: NDArray[np.int64]
    shuffled: int
    aside: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def pack(
    clusters: NDArray[np.int32],
    centroids: NDArray[np.float32],
    settings: PackingSettings,
    seed: int,
    epoch: int,
    domain: int = 0,
    vectors: "VectorsOf | None" = None,
    region: int | None = None,
) -> Packing:
    """Packs the n items of one domain, number ``domain`` of all, into batches: a function of its arguments alone.

    ``clusters`` (n,): the cluster of each item; ``centroids`` (K, d). ``vectors`` reads query and document vectors of
    the given items, for the polish. Every item is in one batch, fewer than ``batch_size`` of them in two: with what
    fills no batch they are the last one. No batch has an item twice, but that of a region with too few. ``region``:
    which one of the domain's these items are, if not all. Raises ``UserError`` for a domain of fewer items than a
    batch, and for a polish without vectors.
    """
    if settings.polish_sweeps and vectors is None:
        raise UserError(f"polish_sweeps is {settings.polish_sweeps}, which needs vectors. Give them, or set it to 0.")
    if len(clusters) < settings.batch_size and region is None:
        raise UserError(
            f"A domain has {len(clusters)} pairs, fewer than the batch_size of {settings.batch_size}. Cluster again"
            " with smallest_domain set to the batch size, or lower the batch size."
        )
    place = [domain] if region is None else [domain, region]
    generator = np.random.default_rng([seed, epoch, *place])
    items = np.arange(len(clusters))
    share, aside = settings.shuffled_share(epoch), items[:0]
    if share and region is not None:
        count = round(share * len(items) / settings.batch_size) * settings.batch_size
        if len(items) - count < settings.batch_size:
            count = len(items)  # too few would remain
        aside, items = np.split(generator.permutation(items), [count])
        items, share = np.sort(items), 0.0
    if share == 1 or not len(items):
        batches = whole_batches(generator.permutation(items), settings.batch_size)
        return Packing(batches, len(batches) if share else 0, aside)
    if settings.order == "topics":
        batches, rest = topic_batches(clusters, items, settings.batch_size, generator)
    else:
        if settings.order == "tour":
            from pipelines.packing.neighbours import find_neighbours
            from pipelines.packing.tour import greedy_tour

            order = greedy_tour(find_neighbours(centroids), int(generator.integers(len(centroids))))
        else:
            order = generator.permutation(len(centroids))
        ordered = items_in_order(items, clusters[items], order, generator)
        batches, rest = cut_into_batches(ordered, settings.batch_size)
    if settings.polish_sweeps and vectors is not None:
        from pipelines.packing.polish import polish_batches

        batches = polish_batches(batches, vectors, settings.polish_sweeps)
    shuffled = round(share * len(batches))
    if shuffled:
        batches = shuffle_some(batches, shuffled, generator)
    return Packing(filled(batches, rest), shuffled, aside)


def shuffle_some(batches: NDArray[np.int64], number: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """``batches`` (batches, B), after ``number`` of them, drawn at random, exchanged their items at random.

    The others stay as they are, all in their places.
    """
    chosen = generator.permutation(len(batches))[:number]
    shuffled = batches.copy()
    shuffled[chosen] = generator.permutation(batches[chosen].ravel()).reshape(-1, batches.shape[1])
    return shuffled


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
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``items`` as batches (batches, batch_size), each item in one, and fewer than a batch that remain.

    Topic-aware sampling of queries, TAS-B (Hofstätter et al. 2021, arXiv:2104.06967, section 3.2): queries are
    clustered once; every batch is composed of queries of one randomly chosen cluster.

    ``clusters[item]``: the cluster of each. A cluster's items are shuffled and cut into batches. Remainders of clusters
    are joined in a random order. The batches then go in a random order. A cluster is next with a probability
    proportional to its remaining whole batches.
    """
    shuffled = generator.permutation(items)
    shuffled = shuffled[np.argsort(clusters[shuffled], kind="stable")]
    labels = clusters[shuffled]
    _, starts, sizes = np.unique(labels, return_index=True, return_counts=True)
    place = np.arange(len(labels)) - np.repeat(starts, sizes)
    whole = place < np.repeat(sizes // batch_size * batch_size, sizes)
    turn = np.repeat(generator.permutation(len(sizes)), sizes)  # of each cluster's rest among the rests
    rest = shuffled[~whole][np.argsort(turn[~whole], kind="stable")]
    batches, remaining = cut_into_batches(np.concatenate((shuffled[whole], rest)), batch_size)
    return generator.permutation(batches), remaining


def cut_into_batches(flat: NDArray[np.int64], batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The list (n,) as (n // batch_size, batch_size), and what is behind the last full batch."""
    count = len(flat) // batch_size * batch_size
    return flat[:count].reshape(-1, batch_size), flat[count:]


def filled(batches: NDArray[np.int64], rest: NDArray[np.int64]) -> NDArray[np.int64]:
    """``batches`` (n, B) and, if there is a ``rest``, one of it and of items of the first batch, which it has not.

    Without a full batch the rest's own items fill it, which a region of few pairs may come to.
    """
    if not len(rest):
        return batches
    last = np.resize(np.concatenate((rest, batches[:1].ravel())), (1, batches.shape[1]))
    return np.concatenate((batches, last))


def whole_batches(items: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """The list (n,) as batches (⌈n / batch_size⌉, batch_size)."""
    return filled(*cut_into_batches(items, batch_size))


def share(count: int, number: int, of: int, turn: int) -> slice:
    """Share ``number`` of ``count`` items shared out among ``of``.

    Shares differ by an item at most, and so do those of several lists of one length, each of its own ``turn``.
    """
    return slice(*((count * cut + turn) // of for cut in (number, number + 1)))
