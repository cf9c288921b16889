"""Whose pairs are packed together: a domain's clusters, or, without clusters, a domain's pairs as they are."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytriever.pipelines.clusters import DomainClusters, read_domain
from raytriever.pipelines.packing.pack import DomainGroups, SmallDomains, group_domains
from raytriever.pipelines.pairs import read_pairs
from raytriever.retrieval.artifacts import Artifact

NO_CLUSTER = -1


@dataclass(frozen=True)
class PackedTogether:
    """``pairs`` int64 (n,): numbers in the pairs artifact; ``clusters`` int32 (n,): of each, None where there are none;
    ``centroids`` (K, d) of the clusters; ``name`` is None where every pair keeps its own domain."""

    name: str | None
    pairs: NDArray[np.int64]
    clusters: NDArray[np.int32] | None
    centroids: NDArray[np.float32]


def clustered(clusters: Artifact) -> Iterator[PackedTogether]:
    """Domain after domain of a clusters artifact: only one is held."""
    for number in range(len(clusters.shards)):
        domain: DomainClusters = read_domain(clusters, number)
        yield PackedTogether(domain.name, domain.pairs, domain.clusters, domain.centroids)


def unclustered(groups: DomainGroups) -> Iterator[PackedTogether]:
    """Each group's pairs, without clusters."""
    by_group = np.argsort(groups.labels, kind="stable")
    bounds = np.searchsorted(groups.labels[by_group], np.arange(len(groups.names) + 1))
    for number, name in enumerate(groups.names):
        yield PackedTogether(name, by_group[bounds[number] : bounds[number + 1]], None, _nothing())


def mixed(count: int) -> Iterator[PackedTogether]:
    """All pairs as if they were of one domain."""
    yield PackedTogether(None, np.arange(count), None, _nothing())


def groups_of(pairs: Artifact, smallest: int, small_domains: SmallDomains) -> DomainGroups:
    """``group_domains`` of a pairs artifact."""
    return group_domains(domains_of(pairs), smallest, small_domains)


def domains_of(pairs: Artifact) -> pa.ChunkedArray:
    """The domain of every pair."""
    return read_pairs(pairs, ["domain"])["domain"]


def _nothing() -> NDArray[np.float32]:
    return np.zeros((1, 1), dtype=np.float32)
