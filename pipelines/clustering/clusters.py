"""Clusters as an artifact: for each domain, the cluster of every pair and the centroids."""

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact

CLUSTERS = "clusters"


@dataclass(frozen=True)
class DomainPairs:
    """Pairs of a ``domain`` that are packed together.

    ``pairs`` int64 (n,): numbers in the pairs artifact. ``clusters`` int32 (n,): of each pair. ``centroids`` (K, d).
    """

    domain: str
    pairs: NDArray[np.int64]
    clusters: NDArray[np.int32]
    centroids: NDArray[np.float32]


def read_domain(artifact: Artifact, number: int) -> DomainPairs:
    """One domain of a clusters artifact."""
    shard = artifact.shards[number]
    table = pq.read_table(artifact.path(shard.files[0].name))
    return DomainPairs(
        str(shard.facts["domain"]),
        table["pair"].to_numpy(),
        table["cluster"].to_numpy(),
        read_centroids(artifact, number),
    )


def read_centroids(artifact: Artifact, number: int) -> NDArray[np.float32]:
    """The centroids of one domain, memory-mapped."""
    return np.asarray(np.load(artifact.path(artifact.shards[number].files[1].name), mmap_mode="r"))
