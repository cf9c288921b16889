"""Clusters as an artifact: for each domain, the cluster of every pair and the centroids."""

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.retrieval.artifacts import Artifact

CLUSTERS = "clusters"


@dataclass(frozen=True)
class DomainClusters:
    """One domain: its name, its pairs (numbers in the pairs artifact), the cluster of each, the centroids (K, d)."""

    name: str
    pairs: NDArray[np.int64]
    clusters: NDArray[np.int32]
    centroids: NDArray[np.float32]


def read_clusters(artifact: Artifact) -> list[DomainClusters]:
    """Every domain of a clusters artifact, in order."""
    domains = []
    for shard in artifact.shards:
        table = pq.read_table(artifact.path(shard.files[0].name))
        domains.append(
            DomainClusters(
                str(shard.facts["domain"]),
                table["pair"].to_numpy(),
                table["cluster"].to_numpy(),
                np.load(artifact.path(shard.files[1].name), mmap_mode="r"),
            )
        )
    return domains
